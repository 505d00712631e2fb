"""A decoding step of Griffin's recurrent block, between its projections.  arXiv:2402.19427.

    c = Σ_i kernel_i x_{t-W+1+i} + bias                 a causal convolution of W tokens
    r = σ(W_a c + b_a), i = σ(W_x c + b_x)              W_a, W_x block-diagonal
    h = a h + sqrt(1 - a²) i c,  log a = -8 softplus(-a_logit) r
    y = gelu(gate) h

At the start of a document the window and h are 0, and h = i c; padding leaves both unchanged.
"""

import numpy as np

from ..constants import PADDING, STARTS
from ._common import cast
from .gated_linear_unit import gated_linear_unit
from .rg_lru import rg_lru


def rg_lru_step(
    x,
    gate,
    window,
    hidden,
    conv_kernel,
    conv_bias,
    kernel_a,
    bias_a,
    kernel_x,
    bias_x,
    a_logit,
    token_kind=None,
    dtype=np.float64,
):
    """x, gate, hidden: [B, D]; window: [B, W-1, D]; kernel_a, kernel_x: [n, D / n, D / n].

    conv_kernel: [W, D]; conv_bias, a_logit: [D]; bias_a, bias_x: [n, D / n]; token_kind: [B] or
    None. Returns (y [B, D], window, hidden).
    """
    x, gate, window, hidden = cast(dtype, x, gate, window, hidden)
    conv_kernel, conv_bias, kernel_a, bias_a, kernel_x, bias_x = cast(
        dtype, conv_kernel, conv_bias, kernel_a, bias_a, kernel_x, bias_x
    )
    batch = len(x)
    kind = np.zeros(batch) - 1 if token_kind is None else np.asarray(token_kind)
    starts, padding = (kind == STARTS)[:, None], (kind == PADDING)[:, None]
    x = np.where(padding, 0, x)
    seen = np.concatenate((np.where(starts[..., None], 0, window), x[:, None]), axis=1)
    c = np.einsum("bwd,wd->bd", seen, conv_kernel) + conv_bias
    gate_a, gate_x = (
        (np.einsum("bni,nij->bnj", c.reshape(batch, *bias.shape), kernel) + bias).reshape(x.shape)
        for kernel, bias in ((kernel_a, bias_a), (kernel_x, bias_x))
    )
    kinds = None if token_kind is None else np.asarray(token_kind)[:, None]
    h, after = rg_lru(c[:, None], gate_a[:, None], gate_x[:, None], a_logit, hidden, kinds, dtype)
    window = np.where(padding[..., None], window, seen[:, 1:])
    return gated_linear_unit(gate, h[:, 0], "gelu", dtype), window, after
