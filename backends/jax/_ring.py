"""Ring buffers of a document's last tokens: the token at position p is in slot p mod C.

`position` [B] is the position of the next token. Slots that no token has reached hold nothing.
"""

import jax
import jax.numpy as jnp


def to_row(ring, position, end, length):
    """The tokens of ring [B, C, ...] in a row [B, length, ...], the last of them at `end` - 1.

    The row is 0 everywhere else. This is the transpose of `to_ring`.
    """
    capacity = ring.shape[1]
    if capacity == 0:
        return jnp.zeros((ring.shape[0], length, *ring.shape[2:]), ring.dtype)
    age = end[:, None] - 1 - jnp.arange(length)
    position = position[:, None]
    kept = (age >= 0) & (age < jnp.minimum(position, capacity))
    return take(ring, (position - 1 - age) % capacity, kept)


def to_ring(row, position, end, capacity):
    """The ring [B, capacity, ...] that holds the last tokens of `row` before index `end`."""
    if capacity == 0:
        return row[:, :0]
    age = ages(position, capacity)
    return take(row, jnp.maximum(end[:, None] - 1 - age, 0), age < position[:, None])


def ages(position, capacity):
    """How many tokens came after the one in each slot, [B, C]; at least `position`: it is empty."""
    return (position[:, None] - 1 - jnp.arange(capacity)) % capacity


def take(x, index, valid):
    """x[b, index[b, i]] where `valid`, else 0; x: [B, T, ...]; index, valid: [B, I]."""
    taken = jax.vmap(lambda row, i: row[i])(x, index)
    return jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), taken, 0)
