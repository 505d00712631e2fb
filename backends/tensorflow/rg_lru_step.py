"""A token of Griffin's recurrent block, between its linear maps (arXiv:2402.19427)."""

import tensorflow as tf

from ..constants import PADDING, STARTS
from ._common import accumulation_dtype
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
):
    """x, gate, hidden: [B, D]; window: [B, W-1, D]. Returns (y [B, D], window, hidden)."""
    dtype = accumulation_dtype(x, gate, window, hidden, conv_kernel, kernel_a, kernel_x, a_logit)
    inputs, gate_values, window = (tf.cast(t, dtype) for t in (x, gate, window))
    before, kinds = window, None
    if token_kind is not None:
        kinds = token_kind[:, None]
        inputs = tf.where(kinds == PADDING, tf.zeros_like(inputs), inputs)
        before = tf.where(kinds[..., None] == STARTS, tf.zeros_like(window), window)
    seen = tf.concat((before, inputs[:, None]), axis=1)
    c = tf.reduce_sum(seen * tf.cast(conv_kernel, dtype), axis=1) + tf.cast(conv_bias, dtype)
    blocks = tf.reshape(c, (-1, *bias_a.shape))
    gate_a, gate_x = (
        tf.reshape(
            tf.einsum("bni,nij->bnj", blocks, tf.cast(kernel, dtype)) + tf.cast(bias, dtype),
            tf.shape(c),
        )
        for kernel, bias in ((kernel_a, bias_a), (kernel_x, bias_x))
    )
    h, hidden = rg_lru(c[:, None], gate_a[:, None], gate_x[:, None], a_logit, hidden, kinds)
    after = seen[:, 1:]
    if kinds is not None:
        after = tf.where(kinds[..., None] == PADDING, window, after)
    y = gated_linear_unit(gate_values, h[:, 0], activation="gelu")
    return tf.cast(y, x.dtype), after, hidden
