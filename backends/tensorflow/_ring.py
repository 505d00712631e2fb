"""Ring buffers of a document's last tokens: the token at position p is in slot p mod C.

`position` [B] is the position of the next token. Slots that no token has reached hold nothing. C
may be 0, and may be unknown when a graph is traced.
"""

import tensorflow as tf


def to_row(ring, position, end, length):
    """The tokens of ring [B, C, ...] in a row [B, length, ...], the last of them at `end` - 1.

    The row is 0 everywhere else. This is the transpose of `to_ring`.
    """
    capacity = tf.shape(ring)[1]
    if not ring.shape[1]:  # 0 or unknown: `take` needs a slot, even to ignore it
        ring = tf.pad(ring, [[0, 0], [0, 1]] + [[0, 0]] * (len(ring.shape) - 2))
    age = end[:, None] - 1 - tf.range(length)
    position = position[:, None]
    kept = (age >= 0) & (age < tf.minimum(position, capacity))
    return take(ring, (position - 1 - age) % tf.maximum(capacity, 1), kept)


def to_ring(row, position, end, capacity):
    """The ring [B, capacity, ...] that holds the last tokens of `row` before index `end`."""
    age = ages(position, capacity)
    ring = take(row, tf.maximum(end[:, None] - 1 - age, 0), age < position[:, None])
    if isinstance(capacity, int):
        ring.set_shape([row.shape[0], capacity, *row.shape[2:]])
    return ring


def ages(position, capacity):
    """How many tokens came after the one in each slot, [B, C]; at least `position`: it is empty."""
    return (position[:, None] - 1 - tf.range(capacity)) % tf.maximum(capacity, 1)


def take(x, index, valid):
    """x[b, index[b, i]] where `valid`, else 0; x: [B, T, ...]; index, valid: [B, I]."""
    valid = tf.reshape(valid, tf.concat([tf.shape(valid), [1] * (len(x.shape) - 2)], 0))
    taken = tf.where(valid, tf.gather(x, index, batch_dims=1), tf.zeros([], x.dtype))
    taken.set_shape([*index.shape, *x.shape[2:]])  # lost if the batch is unknown
    return taken
