"""Circular buffers of a document's last tokens: the token at position p is in slot p mod C.

`position` [B] is the position of the next token. Slots not yet reached by a token are empty. The
capacity C may be 0, and may be unknown when a graph is traced.
"""

import tensorflow as tf

from ._common import apply_linear, length_of, take


def to_sequence(buffer, position, end, length):
    """The tokens of `buffer` [B, C, ...] as a sequence [B, length, ...] that ends at index `end`.

    The sequence is 0 everywhere else. This is the transpose of `from_sequence`.
    """
    capacity = length_of(buffer)
    return apply_linear(
        lambda buffer: _to_sequence(buffer, position, end, length),
        lambda sequence: _from_sequence(sequence, position, end, capacity),
        buffer,
    )


def from_sequence(sequence, position, end, capacity):
    """The buffer [B, capacity, ...] of the last tokens of `sequence` before index `end`."""
    length = length_of(sequence)
    return apply_linear(
        lambda sequence: _from_sequence(sequence, position, end, capacity),
        lambda buffer: _to_sequence(buffer, position, end, length),
        sequence,
    )


def _to_sequence(buffer, position, end, length):
    capacity = tf.shape(buffer)[1]
    if not buffer.shape[1]:  # 0 or unknown: `take` needs a slot, even to ignore it
        buffer = tf.pad(buffer, [[0, 0], [0, 1]] + [[0, 0]] * (len(buffer.shape) - 2))
    age = end[:, None] - 1 - tf.range(length)
    position = position[:, None]
    valid = (age >= 0) & (age < tf.minimum(position, capacity))
    return take(buffer, (position - 1 - age) % tf.maximum(capacity, 1), valid)


def _from_sequence(sequence, position, end, capacity):
    age = ages(position, capacity)
    buffer = take(sequence, tf.maximum(end[:, None] - 1 - age, 0), age < position[:, None])
    if isinstance(capacity, int):
        buffer.set_shape([sequence.shape[0], capacity, *sequence.shape[2:]])
    return buffer


def ages(position, capacity):
    """The age of each slot in tokens, [B, C]; at least `position` for an empty slot."""
    return (position[:, None] - 1 - tf.range(capacity)) % tf.maximum(capacity, 1)
