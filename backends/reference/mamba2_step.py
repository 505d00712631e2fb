"""A decoding step of Mamba-2 between its linear layers.  Dao and Gu 2024, arXiv:2405.21060.

    x, [B, C] = silu(conv1d(x)), silu(conv1d([B, C]))    causal convolutions of W tokens
    Δ = softplus(dt + dt_bias),  a = exp(-Δ exp(a_log))                in each head
    S' = a S + B (Δ x)^T,  o = S'^T C + skip x
    y = norm(o * silu(z)),  or  norm(o) * silu(z)    RMSNorm over the channels of a group, or none

The consecutive heads of a group share B and C. `bc` has B and C of the first group, then of the
next. At the start of a document, windows and S are 0; padding leaves them unchanged.
"""

import numpy as np

from ._common import cast
from .causal_conv1d import causal_conv1d
from .gated_linear_unit import gated_linear_unit
from .lightning_step import lightning_step
from .rms_norm import rms_norm


def mamba2_step(
    z,
    x,
    bc,
    dt,
    x_window,
    bc_window,
    memory,
    x_kernel,
    bc_kernel,
    a_log,
    dt_bias,
    skip,
    x_bias=None,
    bc_bias=None,
    norm_scale=None,
    token_kind=None,
    epsilon=None,
    norm_after_gate=True,
    dtype=np.float64,
):
    """z, x: [B, H P]; bc: [B, 2 G N]; dt: [B, H]; memory: [B, H, N, P]; windows: [B, W-1, width].

    Kernels are [W, width]; x_bias, bc_bias: [width] or None; a_log, dt_bias, skip: [H]. norm_scale
    is [H P], or None without a norm. token_kind: [B] or None.

    Returns (y [B, H P], both windows, memory).
    """
    z, dt, a_log, dt_bias, skip = cast(dtype, z, dt, a_log, dt_bias, skip)
    kinds = None if token_kind is None else np.asarray(token_kind)[:, None]

    def convolve(inputs, kernel, bias, window):
        inputs = np.asarray(inputs)[:, None]
        y, window = causal_conv1d(inputs, kernel, bias, window, kinds, "silu", dtype)
        return y[:, 0], window

    x, x_window = convolve(x, x_kernel, x_bias, x_window)
    bc, bc_window = convolve(bc, bc_kernel, bc_bias, bc_window)
    batch, heads, keys, values = np.shape(memory)
    x, bc = x.reshape(batch, heads, values), bc.reshape(batch, -1, 2, keys)
    dt = np.logaddexp(0, dt + dt_bias)
    attention = bc[:, :, 1], bc[:, :, 0], x * dt[..., None], memory, -dt * np.exp(a_log)
    o, _, memory = lightning_step(*attention, token_kind=token_kind, dtype=dtype)
    o = (o + x * skip[:, None]).reshape(z.shape)

    def norm(o):
        if norm_scale is None:
            return o
        o = rms_norm(o.reshape(*bc.shape[:2], -1), None, epsilon, dtype).reshape(z.shape)
        return o * cast(dtype, norm_scale)[0]

    if norm_after_gate:
        y = norm(gated_linear_unit(z, o, "silu", dtype))
    else:
        y = gated_linear_unit(z, norm(o), "silu", dtype)
    return y, x_window, bc_window, memory
