"""A decoding step of Mamba-2 between its linear layers.  Dao and Gu 2024, arXiv:2405.21060."""

from keras import ops

from keras_recurrent.portable._common import (
    fill_where,
    framework_softplus,
    sum_dtype,
    token_masks,
)
from keras_recurrent.portable.causal_conv1d import causal_conv1d
from keras_recurrent.portable.gated_linear_unit import gated_linear_unit
from keras_recurrent.portable.lightning_step import lightning_step
from keras_recurrent.portable.rms_norm import rms_norm


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
):
    """See `backends/reference/mamba2_step.py`. Returns (y [B, H P], both windows, memory)."""
    dtype = sum_dtype(z, x, bc, dt, memory, x_kernel, bc_kernel, a_log, dt_bias, skip, norm_scale)
    kinds = None if token_kind is None else token_kind[:, None]

    def convolve(inputs, kernel, bias, window):
        inputs = ops.cast(inputs, dtype)[:, None]
        y, window = causal_conv1d(inputs, kernel, bias, window, kinds, "silu")
        return y[:, 0], window

    x, x_window = convolve(x, x_kernel, x_bias, x_window)
    bc, bc_window = convolve(bc, bc_kernel, bc_bias, bc_window)
    _, heads, keys, values = memory.shape
    x, bc = ops.reshape(x, (-1, heads, values)), ops.reshape(bc, (x.shape[0], -1, 2, keys))
    dt = framework_softplus(ops.cast(dt, dtype) + ops.cast(dt_bias, dtype))
    log_decay = -dt * ops.exp(ops.cast(a_log, dtype))
    attention = bc[:, :, 1], bc[:, :, 0], x * dt[..., None], memory, log_decay
    o, _, memory = lightning_step(*attention, token_kind=token_kind)
    o = ops.reshape(o + x * ops.cast(skip, dtype)[:, None], z.shape)
    _, padding = token_masks(kinds, 2)
    gate = fill_where(padding, 0.0, ops.cast(z, dtype))

    def norm(o):
        if norm_scale is None:
            return o
        o = rms_norm(ops.reshape(o, (*bc.shape[:2], -1)), None, epsilon)
        return ops.reshape(o, z.shape) * ops.cast(norm_scale, dtype)

    if norm_after_gate:
        y = norm(gated_linear_unit(gate, o, "silu"))
    else:
        y = gated_linear_unit(gate, norm(o), "silu")
    return ops.cast(y, z.dtype), x_window, bc_window, memory
