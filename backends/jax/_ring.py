"""A ring of a document's last tokens: the one at position p lies in slot p mod C.

`position` [B] is that of the token to come: slots that no token has reached hold nothing.
"""

import jax
import jax.numpy as jnp


def to_row(ring, position, end, length):
    """The tokens of ring [B, C, ...] in a row [B, length, ...], the last at place `end` - 1.

    What else the row holds is 0. The transpose of `to_ring`.
    """
    capacity = ring.shape[1]
    if capacity == 0:
        return jnp.zeros((ring.shape[0], length, *ring.shape[2:]), ring.dtype)
    age = end[:, None] - 1 - jnp.arange(length)
    position = position[:, None]
    kept = (age >= 0) & (age < jnp.minimum(position, capacity))
    return _take(ring, (position - 1 - age) % capacity, kept)


def to_ring(row, position, end, capacity):
    """The ring [B, capacity, ...] after the tokens of `row` that stand before place `end`."""
    if capacity == 0:
        return row[:, :0]
    age = ages(position, capacity)
    return _take(row, jnp.maximum(end[:, None] - 1 - age, 0), age < position[:, None])


def ages(position, capacity):
    """How many tokens came after that of each slot, [B, C]; `position` or more: it is empty."""
    return (position[:, None] - 1 - jnp.arange(capacity)) % capacity


def _take(x, index, valid):
    taken = jax.vmap(lambda row, i: row[i])(x, index)
    return jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), taken, 0)
