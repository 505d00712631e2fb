"""A ring of a document's last tokens: the one at position p lies in slot p mod C.

`position` [B] is that of the token to come: slots that no token has reached hold nothing. C may
be 0, and unknown until the graph runs.
"""

import tensorflow as tf


def to_row(ring, position, end, length):
    """The tokens of ring [B, C, ...] in a row [B, length, ...], the last at place `end` - 1.

    What else the row holds is 0. The transpose of `to_ring`.
    """
    capacity = tf.shape(ring)[1]
    if not ring.shape[1]:  # 0, or perhaps 0: a slot to point at when nothing is kept
        ring = tf.pad(ring, [[0, 0], [0, 1]] + [[0, 0]] * (len(ring.shape) - 2))
    age = end[:, None] - 1 - tf.range(length)
    position = position[:, None]
    kept = (age >= 0) & (age < tf.minimum(position, capacity))
    return take(ring, (position - 1 - age) % tf.maximum(capacity, 1), kept)


def to_ring(row, position, end, capacity):
    """The ring [B, capacity, ...] after the tokens of `row` that stand before place `end`."""
    age = ages(position, capacity)
    ring = take(row, tf.maximum(end[:, None] - 1 - age, 0), age < position[:, None])
    if isinstance(capacity, int):
        ring.set_shape([row.shape[0], capacity, *row.shape[2:]])
    return ring


def ages(position, capacity):
    """How many tokens came after that of each slot, [B, C]; `position` or more: it is empty."""
    return (position[:, None] - 1 - tf.range(capacity)) % tf.maximum(capacity, 1)


def take(x, index, valid):
    """x[b, index[b, i]] where `valid`, else 0; x [B, T, ...], index and valid [B, I]."""
    valid = tf.reshape(valid, tf.concat([tf.shape(valid), [1] * (len(x.shape) - 2)], 0))
    taken = tf.where(valid, tf.gather(x, index, batch_dims=1), tf.zeros([], x.dtype))
    taken.set_shape([*index.shape, *x.shape[2:]])  # lost where the batch is unknown
    return taken
