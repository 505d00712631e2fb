"""A decoding step of Griffin's recurrent block, between its projections.  arXiv:2402.19427.

    c = Σ_i kernel_i x_{t-W+1+i} + bias                 a causal convolution of W tokens
    r = σ(W_a c + b_a), i = σ(W_x c + b_x)              W_a, W_x block-diagonal
    h = a h + sqrt(1 - a²) i c,  log a = -8 softplus(-a_logit) r
    y = gelu(gate) h

At the start of a document the window and h are 0, and h = i c; padding leaves both unchanged.
"""

import numpy as np

from ._common import cast
from .causal_conv1d import causal_conv1d
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
    kernel_a, bias_a, kernel_x, bias_x = cast(dtype, kernel_a, bias_a, kernel_x, bias_x)
    kinds = None if token_kind is None else np.asarray(token_kind)[:, None]
    token = np.asarray(x)[:, None]
    c, window = causal_conv1d(token, conv_kernel, conv_bias, window, kinds, dtype=dtype)
    blocks = c.reshape(len(c), *bias_a.shape)
    gate_a, gate_x = (
        (np.einsum("bni,nij->bnj", blocks, kernel) + bias).reshape(c.shape)
        for kernel, bias in ((kernel_a, bias_a), (kernel_x, bias_x))
    )
    h, hidden = rg_lru(c, gate_a, gate_x, a_logit, hidden, kinds, dtype)
    return gated_linear_unit(gate, h[:, 0], "gelu", dtype), window, hidden
