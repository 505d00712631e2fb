"""Circular buffers of a document's last tokens: the token at position p is in slot p mod C.

`position` [B] is the position of the next token. Slots not yet reached by a token are empty.
"""

import jax.numpy as jnp

from ._common import take


def to_sequence(buffer, position, end, length):
    """The tokens of `buffer` [B, C, ...] as a sequence [B, length, ...] that ends at index `end`.

    The sequence is 0 everywhere else. This is the transpose of `from_sequence`.
    """
    capacity = buffer.shape[1]
    if capacity == 0:
        return jnp.zeros((buffer.shape[0], length, *buffer.shape[2:]), buffer.dtype)
    age = end[:, None] - 1 - jnp.arange(length)
    position = position[:, None]
    valid = (age >= 0) & (age < jnp.minimum(position, capacity))
    return take(buffer, (position - 1 - age) % capacity, valid)


def from_sequence(sequence, position, end, capacity):
    """The buffer [B, capacity, ...] of the last tokens of `sequence` before index `end`."""
    if capacity == 0:
        return sequence[:, :0]
    age = ages(position, capacity)
    return take(sequence, jnp.maximum(end[:, None] - 1 - age, 0), age < position[:, None])


def ages(position, capacity):
    """The age of each slot in tokens, [B, C]; at least `position` for an empty slot."""
    return (position[:, None] - 1 - jnp.arange(capacity)) % max(capacity, 1)
