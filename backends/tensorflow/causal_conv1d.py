"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}: one filter a channel, over a document's real tokens.

The slices are those of `backends/torch`.
"""

import tensorflow as tf

from ._common import (
    accumulation_dtype,
    as_tensors,
    filled,
    length_of,
    move,
    recompute,
    scaled,
    sigmoid,
    state_or_zeros,
    sum_over_tokens,
)
from ._real_tokens import RealTokens


def causal_conv1d(x, kernel, bias=None, initial_state=None, token_kind=None, activation=None):
    """x: [B, T, D]; kernel: [W, D]; bias: [D]; activation: None or "silu"."""
    x, kernel, bias, initial_state = as_tensors(x, kernel, bias, initial_state)
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    taps, length = kernel.shape[0] - 1, length_of(x)
    tokens = None if token_kind is None else RealTokens(token_kind)
    if tokens is not None:
        # Documents of the inputs, [B, W - 1 + T]; the indices of the last inputs, the final state;
        # and a mask of those before the last start. Documents are compared by `tf.not_equal`: where
        # the batch is unknown, the result of `!=` may have no known rank.
        document = tf.pad(tokens.document, [[0, 0], [taps, 0]])
        last = tokens.count + tf.range(taps)
        outdated = tf.not_equal(move(document, last), tokens.starts[:, -1:])

    def tapped(inputs, tap):
        """The input of a tap for each token; zeros if it belongs to another document."""
        rows = inputs[:, tap : tap + length]
        if tokens is None or tap == taps:
            return rows
        other = tf.not_equal(document[:, tap : tap + length], document[:, taps:])
        return filled(rows, other, 0)

    def convolve(x, kernel, bias, state):
        # The state, then the real tokens, then zeros, [B, W - 1 + T, D].
        given = tf.cast(x if tokens is None else tokens.to_front(x), dtype)
        inputs, weights = tf.concat([state, given], axis=1), tf.cast(kernel, dtype)
        y = tf.add_n([scaled(weights[tap], tapped(inputs, tap)) for tap in range(taps + 1)])
        y = added(y, tf.cast(bias, dtype))
        y = tf.cast(y * sigmoid(y) if activation == "silu" else y, x.dtype)
        if tokens is None:
            return y, inputs[:, length:]
        return tokens.put_back(y), filled(move(inputs, last), outdated, 0)

    @tf.custom_gradient
    def added(y, bias):
        return y + bias, lambda d: (d, sum_over_tokens(d))

    if bias is None:
        bias = tf.zeros(kernel.shape[1:], dtype)
    state = state_or_zeros(initial_state, [tf.shape(x)[0], taps, x.shape[2]], dtype)
    return recompute(convolve, x, kernel, bias, state)
