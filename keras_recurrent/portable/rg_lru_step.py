"""A decoding step of Griffin's recurrent block, between its projections.  arXiv:2402.19427."""

from keras import ops

from keras_recurrent.backends.constants import DECAY_EXPONENT
from keras_recurrent.portable._common import (
    applied_decay,
    fill_where,
    framework_expm1,
    framework_softplus,
    matmul,
    sum_dtype,
    token_masks,
)
from keras_recurrent.portable.causal_conv1d import causal_conv1d
from keras_recurrent.portable.gated_linear_unit import gated_linear_unit


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
):
    """x, gate, hidden: [B, D]; window: [B, W-1, D]. Returns (y [B, D], window, hidden)."""
    dtype = sum_dtype(x, gate, window, hidden, conv_kernel, kernel_a, kernel_x, a_logit)
    kinds = None if token_kind is None else token_kind[:, None]
    token = ops.cast(x, dtype)[:, None]
    c, window = causal_conv1d(token, conv_kernel, conv_bias, window, kinds)
    c = c[:, 0]

    def block_diagonal(kernel, bias):
        blocks = ops.transpose(ops.reshape(c, (-1, *bias.shape)), (1, 0, 2))
        y = ops.transpose(matmul(blocks, ops.cast(kernel, dtype)), (1, 0, 2))
        return ops.reshape(y + ops.cast(bias, dtype), (-1, c.shape[1]))

    gates = block_diagonal(kernel_a, bias_a), block_diagonal(kernel_x, bias_x)
    starts, padding = token_masks(kinds, 2)
    h = _recurrence(c, *gates, a_logit, ops.cast(hidden, dtype), starts, padding)
    y = gated_linear_unit(fill_where(padding, 0.0, ops.cast(gate, dtype)), h, "gelu")
    return ops.cast(y, x.dtype), window, h


def _recurrence(x, gate_a, gate_x, a_logit, hidden, starts, padding):
    """One step of `rg_lru`, with the framework's logarithms, whose digits XLA keeps.

    On torch, `rg_lru` for one token takes 1.3 times as long, because it makes them of others.
    """
    softplus = framework_softplus(-ops.cast(a_logit, x.dtype))
    log_a = -DECAY_EXPONENT * softplus * ops.sigmoid(gate_a)
    scale = fill_where(starts, 1.0, ops.sqrt(-framework_expm1(2.0 * log_a)))
    inputs = fill_where(padding, 0.0, scale * ops.sigmoid(gate_x) * x)
    return applied_decay(ops.exp(log_a), starts, padding) * hidden + inputs
