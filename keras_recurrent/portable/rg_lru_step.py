"""A decoding step of Griffin's recurrent block, between its projections.  arXiv:2402.19427."""

from keras import ops

from keras_recurrent.portable._common import fill_where, matmul, sum_dtype, token_masks
from keras_recurrent.portable.gated_linear_unit import gated_linear_unit
from keras_recurrent.portable.rg_lru import rg_lru


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
    inputs, gate, window = (ops.cast(t, dtype) for t in (x, gate, window))
    kinds = None if token_kind is None else token_kind[:, None]
    starts, padding = token_masks(kinds, 3)
    inputs = fill_where(padding, 0.0, inputs[:, None])
    seen = ops.concatenate([fill_where(starts, 0.0, window), inputs], axis=1)
    c = ops.sum(seen * ops.cast(conv_kernel, dtype), axis=1) + ops.cast(conv_bias, dtype)

    def block_diagonal(kernel, bias):
        blocks = ops.transpose(ops.reshape(c, (-1, *bias.shape)), (1, 0, 2))
        y = ops.transpose(matmul(blocks, ops.cast(kernel, dtype)), (1, 0, 2))
        return ops.reshape(y + ops.cast(bias, dtype), (-1, 1, c.shape[1]))

    gates = block_diagonal(kernel_a, bias_a), block_diagonal(kernel_x, bias_x)
    h, hidden = rg_lru(c[:, None], *gates, a_logit, hidden, kinds)
    after = seen[:, 1:] if padding is None else ops.where(padding, window, seen[:, 1:])
    return ops.cast(gated_linear_unit(gate, h[:, 0], "gelu"), x.dtype), after, hidden
