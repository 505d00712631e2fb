"""Time cut into chunks, chunks gathered into groups, for linear attention.

All chunks of a group are worked on at once, by matrix products, and one group follows another: so
the work of a group stays in the cache, and its temporaries do not grow with the sequence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Numbers in the part of an argument that belongs to a group.
GROUP_SIZE = 1 << 17


class Plan(NamedTuple):
    """groups * chunks * size tokens, at least as many as there are; size is a power of two."""

    groups: int
    chunks: int
    size: int

    @property
    def tokens(self):
        return self.groups * self.chunks * self.size


def plan(q, v, longest):
    """How to cut q: [B, T, H, K] and v: [B, T, H, V] into chunks of at most `longest` tokens."""
    batch, length, heads, width = q.shape
    size = min(longest, 1 << (length - 1).bit_length())
    chunks = -(-length // size)
    room = GROUP_SIZE // (batch * heads * size * max(width, v.shape[3]))
    groups = -(-chunks // max(1, room))
    return Plan(groups, -(-chunks // groups), size)


def grouped(tensors, plan):
    """Each [B, T, ...] as [groups, B, tokens of a group, ...], with a tail of zeros."""
    return tuple(None if x is None else _grouped(x, plan) for x in tensors)


def _grouped(x, plan):
    missing = plan.tokens - x.shape[1]
    if missing:
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], plan.groups, plan.chunks * plan.size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def ungrouped(y, length):
    """The inverse of `grouped`, for one tensor."""
    y = jnp.moveaxis(y, 0, 1)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length]


def chunked(x, plan):
    """One group, [B, tokens, H, K], as [B, H, chunks, size, K]."""
    batch, _, heads, width = x.shape
    x = x.reshape(batch, plan.chunks, plan.size, heads, width)
    return x.transpose(0, 3, 1, 2, 4)


def unchunked(y):
    """The inverse of `chunked`."""
    batch, heads, chunks, size, width = y.shape
    return y.transpose(0, 2, 3, 1, 4).reshape(batch, chunks * size, heads, width)


def product(a, b):
    """Matrix product of the last two axes, in full precision on every device."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def inner_products(a, b):
    """a b^T, added up in parts: one long row of additions rounds more than a loop's sums do."""
    parts = [slice(i, i + 64) for i in range(0, a.shape[-1], 64)]
    return sum(product(a[..., part], transposed(b[..., part])) for part in parts)


def transposed(a):
    return jnp.swapaxes(a, -1, -2)


def states(decay, added, first, reverse=False):
    """S' = decay S + added, chunk by chunk, from the last one when `reverse`.

    decay: [B, H, chunks, K, 1], or what broadcasts to it; added: [B, H, chunks, K, V]; first:
    [B, H, K, V]. Returns the state before each chunk, [B, H, chunks, K, V], and the last one.
    """
    decay = jnp.broadcast_to(decay, (*decay.shape[:2], added.shape[2], *decay.shape[3:]))

    def step(state, chunk):
        decay, added = chunk
        return decay * state + added, state

    chunks = (jnp.moveaxis(decay, 2, 0), jnp.moveaxis(added, 2, 0))
    last, before = jax.lax.scan(step, first, chunks, reverse=reverse)
    return jnp.moveaxis(before, 0, 2), last
