"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}: one filter a channel, over a document's real tokens.

The slices are those of `backends/torch`. The gradient is the same filter with opposite shifts.
"""

import tensorflow as tf

from ._common import (
    accumulation_dtype,
    as_tensors,
    dense_gradient,
    filled,
    length_of,
    move,
    scatter,
    state_or_zeros,
    sum_over_tokens,
)
from ._real_tokens import RealTokens


def causal_conv1d(x, kernel, bias=None, initial_state=None, token_kind=None, activation=None):
    """x: [B, T, D]; kernel: [W, D]; bias: [D]; activation: None or "silu".

    Returns ([B, T, D] in x's dtype, [B, W - 1, D] in float32, or float64 if an argument is
    float64).
    """
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

    def inputs_of(x, state):
        """[B, W - 1 + T, D]: the state, then the real tokens, then zeros."""
        if tokens is not None:
            x = tokens.to_front(x)
        return tf.concat([state, tf.cast(x, dtype)], axis=1)

    def tapped(inputs, tap):
        """The input of a tap for each token; zeros if it belongs to another document."""
        rows = inputs[:, tap : tap + length]
        if tokens is None or tap == taps:
            return rows
        other = tf.not_equal(document[:, tap : tap + length], document[:, taps:])
        return filled(rows, other, 0)

    def mirrored(dy, tap):
        """The transpose of `tapped`: for each input, dy of the output token of a tap."""
        ahead = taps - tap
        rows = tf.pad(dy, [[0, 0], [tap, ahead], [0, 0]])
        if tokens is None or tap == taps:
            return rows
        later = tf.pad(document[:, ahead:], [[0, 0], [0, ahead]])
        return filled(rows, tf.not_equal(later, document), 0)

    def filtered(inputs, weights, bias):
        z = tf.add_n([weights[tap] * tapped(inputs, tap) for tap in range(taps + 1)])
        return z + tf.cast(bias, dtype)

    @tf.custom_gradient
    def run(x, kernel, bias, state):
        inputs, weights = inputs_of(x, state), tf.cast(kernel, dtype)
        y = filtered(inputs, weights, bias)
        if activation == "silu":
            y = tf.nn.silu(y)
        y = tf.cast(y, x.dtype)
        if tokens is None:
            final_state = inputs[:, length:]
        else:
            y = move(y, tokens.target)
            final_state = filled(move(inputs, last), outdated, 0)

        def gradient(dy, d_state):
            dy, d_state = dense_gradient(dy, y, dtype), dense_gradient(d_state, final_state, dtype)
            inputs = inputs_of(x, state)
            if tokens is None:
                d_inputs = tf.pad(d_state, [[0, 0], [length, 0], [0, 0]])
            else:
                dy = tokens.to_front(dy)
                d_inputs = scatter(filled(d_state, outdated, 0), last, taps + length)
            dz, d_weights = dy, []
            if activation == "silu":
                z = filtered(inputs, weights, bias)
                dz = dy * tf.sigmoid(z) * (1 + z * tf.sigmoid(-z))
            for tap in range(taps + 1):
                d_inputs += weights[tap] * mirrored(dz, tap)
                d_weights.append(sum_over_tokens(dz * tapped(inputs, tap)))
            dx = tf.cast(d_inputs[:, taps:], x.dtype)
            return (
                dx if tokens is None else move(dx, tokens.target),
                tf.cast(tf.stack(d_weights), kernel.dtype),
                tf.cast(sum_over_tokens(dz), bias.dtype),
                d_inputs[:, :taps],
            )

        return (y, final_state), gradient

    if bias is None:
        bias = tf.zeros(kernel.shape[1:], dtype)
    state = state_or_zeros(initial_state, [tf.shape(x)[0], taps, x.shape[2]], dtype)
    return run(x, kernel, bias, state)
