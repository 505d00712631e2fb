"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}, per channel.  De et al. 2024, arXiv:2402.19427, §2.3.

Padding may stand anywhere, so the real tokens of each row first move together, behind the W - 1
of the state, which leaves padding last; then every tap is a shifted slice, and counts only where
it lies in the same document. The gradient is the mirror image, shifted the other way; what the
activation was applied to is computed again.
"""

from typing import NamedTuple

import tensorflow as tf

from keras_recurrent.backends.tensorflow._common import (
    accumulation_dtype,
    as_tensors,
    dense,
    filled,
    kind_masks,
    length_of,
    state_or_zeros,
    total,
)


def causal_conv1d(x, kernel, bias=None, initial_state=None, token_kind=None, activation=None):
    """x: [B, T, D]; kernel: [W, D]; bias: [D]; activation: None or "silu".

    Returns ([B, T, D] in x's dtype, [B, W - 1, D] in float32, or float64 if an argument is
    float64).
    """
    x, kernel, bias, initial_state = as_tensors(x, kernel, bias, initial_state)
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    taps, length = kernel.shape[0] - 1, length_of(x)
    packing = None if token_kind is None else _pack(token_kind, taps)

    def inputs_of(x, state):
        """[B, W - 1 + T, D]: the state, then the real tokens, then zeros."""
        if packing is not None:
            x = filled(_move(x, packing.order), packing.empty, 0)
        return tf.concat([state, tf.cast(x, dtype)], axis=1)

    def tapped(inputs, tap):
        """What a tap of each token meets."""
        rows = inputs[:, tap : tap + length]
        if packing is None or tap == taps:
            return rows
        document = packing.document
        return filled(rows, document[:, tap : tap + length] != document[:, taps:], 0)

    def mirrored(dy, tap):
        """The gradient of the token that each input meets with a tap."""
        ahead = taps - tap
        rows = tf.pad(dy, [[0, 0], [tap, ahead], [0, 0]])
        if packing is None or tap == taps:
            return rows
        document = tf.pad(packing.document[:, ahead:], [[0, 0], [0, ahead], [0, 0]])
        return filled(rows, document != packing.document, 0)

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
        if packing is None:
            final_state = inputs[:, length:]
        else:
            y = _move(y, packing.place)
            final_state = filled(_move(inputs, packing.last), packing.outdated, 0)

        def gradient(dy, d_state):
            dy, d_state = dense(dy, y, dtype), dense(d_state, final_state, dtype)
            inputs = inputs_of(x, state)
            if packing is None:
                d_inputs = tf.pad(d_state, [[0, 0], [length, 0], [0, 0]])
            else:
                dy = filled(_move(dy, packing.order), packing.empty, 0)
                d_inputs = _place(filled(d_state, packing.outdated, 0), packing.last, taps + length)
            dz, d_weights = dy, []
            if activation == "silu":
                z = filtered(inputs, weights, bias)
                dz = dy * tf.sigmoid(z) * (1 + z * tf.sigmoid(-z))
            for tap in range(taps + 1):
                d_inputs += weights[tap] * mirrored(dz, tap)
                d_weights.append(total(dz * tapped(inputs, tap)))
            dx = tf.cast(d_inputs[:, taps:], x.dtype)
            return (
                dx if packing is None else _move(dx, packing.place),
                tf.cast(tf.stack(d_weights), kernel.dtype),
                tf.cast(total(dz), bias.dtype),
                d_inputs[:, :taps],
            )

        return (y, final_state), gradient

    if bias is None:
        bias = tf.zeros(kernel.shape[1:], dtype)
    return run(x, kernel, bias, state_or_zeros(initial_state, x, dtype, taps))


class _Packing(NamedTuple):
    """How the tokens of each row move; place W - 1 is the first one after the state."""

    place: tf.Tensor  # [B, T]: token t moves to place W - 1 + place[t], padding behind the others
    order: tf.Tensor  # [B, T]: the inverse permutation
    empty: tf.Tensor  # [B, T, 1]: whether padding moved to place W - 1 + t
    document: tf.Tensor  # [B, W - 1 + T, 1]: the number of restarts up to a place
    last: tf.Tensor  # [B, W - 1]: the places of the final state
    outdated: tf.Tensor  # [B, W - 1, 1]: whether they lie before the last restart


def _pack(token_kind, taps):
    restart, padding = (mask[:, :, 0] for mask in kind_masks(token_kind))
    length = length_of(token_kind)
    token = tf.range(length)
    real = tf.cumsum(tf.cast(~padding, tf.int32), axis=1)
    number = real[:, -1:]
    place = tf.where(padding, number + token - real, real - 1)
    order = _place(tf.broadcast_to(token, tf.shape(place)), place, length)
    restarts = tf.cumsum(tf.cast(restart, tf.int32), axis=1)
    document = tf.pad(tf.gather(restarts, order, batch_dims=1), [[0, 0], [taps, 0]])
    last = number + tf.range(taps)
    return _Packing(
        place=place,
        order=order,
        empty=(token >= number)[:, :, None],
        document=document[:, :, None],
        last=last,
        outdated=(_move(document, last) != restarts[:, -1:])[:, :, None],
    )


def _move(tensor, index):
    """tensor[b, index[b, t]]."""
    moved = tf.gather(tensor, index, batch_dims=1)
    moved.set_shape(index.shape + tensor.shape[2:])  # lost where the batch is unknown
    return moved


def _place(tensor, index, length):
    """The inverse: tensor[b, t] at index[b, t], and zeros elsewhere."""
    batch = tf.shape(tensor)[0]
    row = tf.broadcast_to(tf.range(batch)[:, None], tf.shape(index))
    shape = [batch, length, *tensor.shape[2:]]
    return tf.scatter_nd(tf.stack([row, index], axis=-1), tensor, shape)
