"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}: one filter a channel, over a document's real tokens.

De et al. 2024, arXiv:2402.19427, section 2.3 (the temporal convolution before the recurrence).

Padding may be anywhere in a sequence, and the filter skips it. So the real tokens are first moved
to the front, after the W - 1 tokens of the state, and padding to the end. Then the filter is a sum
of shifted slices, one for each tap, masked to inputs of the same document. The gradient is the same
with opposite shifts. The argument of the activation is recomputed.
"""

from typing import NamedTuple

import tensorflow as tf

from ._common import (
    accumulation_dtype,
    as_tensors,
    dense_gradient,
    filled,
    kind_masks,
    length_of,
    state_or_zeros,
    sum_over_tokens,
)


def causal_conv1d(x, kernel, bias=None, initial_state=None, token_kind=None, activation=None):
    """x: [B, T, D]; kernel: [W, D]; bias: [D]; activation: None or "silu".

    Returns ([B, T, D] in x's dtype, [B, W - 1, D] in float32, or float64 if an argument is
    float64).
    """
    x, kernel, bias, initial_state = as_tensors(x, kernel, bias, initial_state)
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    taps, length = kernel.shape[0] - 1, length_of(x)
    tokens = None if token_kind is None else _real_tokens(token_kind, taps)

    def inputs_of(x, state):
        """[B, W - 1 + T, D]: the state, then the real tokens, then zeros."""
        if tokens is not None:
            x = filled(_move(x, tokens.order), tokens.empty, 0)
        return tf.concat([state, tf.cast(x, dtype)], axis=1)

    def tapped(inputs, tap):
        """The input of a tap for each token; zeros if it belongs to another document."""
        rows = inputs[:, tap : tap + length]
        if tokens is None or tap == taps:
            return rows
        document = tokens.document
        other = tf.not_equal(document[:, tap : tap + length], document[:, taps:])
        return filled(rows, other, 0)

    def mirrored(dy, tap):
        """The transpose of `tapped`: for each input, dy of the output token of a tap."""
        ahead = taps - tap
        rows = tf.pad(dy, [[0, 0], [tap, ahead], [0, 0]])
        if tokens is None or tap == taps:
            return rows
        document = tf.pad(tokens.document[:, ahead:], [[0, 0], [0, ahead]])
        return filled(rows, tf.not_equal(document, tokens.document), 0)

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
            y = _move(y, tokens.target)
            final_state = filled(_move(inputs, tokens.last), tokens.outdated, 0)

        def gradient(dy, d_state):
            dy, d_state = dense_gradient(dy, y, dtype), dense_gradient(d_state, final_state, dtype)
            inputs = inputs_of(x, state)
            if tokens is None:
                d_inputs = tf.pad(d_state, [[0, 0], [length, 0], [0, 0]])
            else:
                dy = filled(_move(dy, tokens.order), tokens.empty, 0)
                d_inputs = _scatter(filled(d_state, tokens.outdated, 0), tokens.last, taps + length)
            dz, d_weights = dy, []
            if activation == "silu":
                z = filtered(inputs, weights, bias)
                dz = dy * tf.sigmoid(z) * (1 + z * tf.sigmoid(-z))
            for tap in range(taps + 1):
                d_inputs += weights[tap] * mirrored(dz, tap)
                d_weights.append(sum_over_tokens(dz * tapped(inputs, tap)))
            dx = tf.cast(d_inputs[:, taps:], x.dtype)
            return (
                dx if tokens is None else _move(dx, tokens.target),
                tf.cast(tf.stack(d_weights), kernel.dtype),
                tf.cast(sum_over_tokens(dz), bias.dtype),
                d_inputs[:, :taps],
            )

        return (y, final_state), gradient

    if bias is None:
        bias = tf.zeros(kernel.shape[1:], dtype)
    state = state_or_zeros(initial_state, [tf.shape(x)[0], taps, x.shape[2]], dtype)
    return run(x, kernel, bias, state)


class _RealTokens(NamedTuple):
    """Permutation that moves the real tokens of each sequence before its padding.

    `document` and `last` include the W - 1 inputs of the state, which come before token 0.
    """

    target: tf.Tensor  # [B, T]: target index of token t
    order: tf.Tensor  # [B, T]: token moved to index t, the inverse permutation
    empty: tf.Tensor  # [B, T]: True if padding is moved to index t
    document: tf.Tensor  # [B, W - 1 + T]: documents started up to an index
    last: tf.Tensor  # [B, W - 1]: indices of the last inputs, the final state
    outdated: tf.Tensor  # [B, W - 1]: True if these precede the last start


# Documents are compared by `tf.not_equal`: where the batch is unknown, the result of `!=` may have
# no known rank.


def _real_tokens(token_kind, taps):
    starts, padding = kind_masks(token_kind)
    length = length_of(token_kind)
    token = tf.range(length)
    real = tf.cumsum(tf.cast(~padding, tf.int32), axis=1)
    number = real[:, -1:]
    target = tf.where(padding, number + token - real, real - 1)
    order = _scatter(tf.broadcast_to(token, tf.shape(target)), target, length)
    starts_so_far = tf.cumsum(tf.cast(starts, tf.int32), axis=1)
    document = tf.pad(tf.gather(starts_so_far, order, batch_dims=1), [[0, 0], [taps, 0]])
    last = number + tf.range(taps)
    return _RealTokens(
        target=target,
        order=order,
        empty=token >= number,
        document=document,
        last=last,
        outdated=tf.not_equal(_move(document, last), starts_so_far[:, -1:]),
    )


def _move(tensor, index):
    """tensor[b, index[b, t]]."""
    moved = tf.gather(tensor, index, batch_dims=1)
    moved.set_shape(index.shape + tensor.shape[2:])  # lost if the batch is unknown
    return moved


def _scatter(tensor, index, length):
    """The inverse of `_move`: tensor[b, t] at index[b, t], and zeros elsewhere."""
    batch = tf.shape(tensor)[0]
    row = tf.broadcast_to(tf.range(batch)[:, None], tf.shape(index))
    shape = [batch, length, *tensor.shape[2:]]
    return tf.scatter_nd(tf.stack([row, index], axis=-1), tensor, shape)
