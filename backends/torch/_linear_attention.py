"""Time cut into chunks, chunks gathered into groups, for linear attention.

All chunks of a group are worked on at once, by matrix products, and one group follows another: so
the work of a group stays in the cache, and its temporaries do not grow with the sequence.
"""

import torch

from keras_recurrent.backends.torch._common import PADDING, STARTS, slab_size


def state_shape(q, v):
    return q.shape[0], q.shape[2], q.shape[3], v.shape[3]


def chunk_size(length, longest):
    """A power of two: `longest`, or what holds a short sequence."""
    return min(longest, 1 << (length - 1).bit_length())


def groups_of(q, v, size):
    """Slices of the time axis of q: [B, T, H, K] and v: [B, T, H, V], a few chunks long."""
    batch, length, heads, width = q.shape
    chunk = batch * heads * size * max(width, v.shape[3])
    step = size * max(1, 2 * slab_size(q) // chunk)
    return [slice(i, min(i + step, length)) for i in range(0, length, step)]


def chunked(x, rows, size, dtype):
    """Some rows of x: [B, T, H, K], as [B * H, chunks, size, K], with a tail of zeros."""
    x = x[:, rows]
    batch, length, heads, width = x.shape
    chunks = -(-length // size)
    shape = (batch, heads, chunks * size, width)
    out = x.new_empty(shape, dtype=dtype)
    out[:, :, :length] = x.transpose(1, 2)
    out[:, :, length:] = 0
    return out.view(batch * heads, chunks, size, width)


def unchunk_(out, rows, y):
    """Writes y: [B * H, chunks, size, K], into some rows of out: [B, T, H, K]."""
    out = out[:, rows].transpose(1, 2)
    batch, heads, length, width = out.shape
    out.copy_(y.view(batch, heads, -1, width)[:, :, :length])


def chunked_kinds(token_kind, rows, size, heads):
    """(restart, padding) of some rows, [B * heads, chunks, size, 1]; both None if all go on."""
    if token_kind is None:
        return None, None
    kind = token_kind[:, :, None, None].expand(-1, -1, heads, -1)
    kind = chunked(kind, rows, size, kind.dtype)
    return kind == STARTS, kind == PADDING


def inner_products(a, b):
    """a b^T, added up in parts: one long row of additions rounds more than a loop's sums do."""
    parts = zip(a.split(64, -1), b.split(64, -1), strict=True)
    return sum(a_i @ b_i.mT for a_i, b_i in parts)


def states_(decay, added, first, reverse=False):
    """S' = decay S + added, chunk by chunk, from the last one if `reverse`.

    decay: [B * H, chunks, K, 1], or what broadcasts to it; added: [B * H, chunks, K, V], which
    becomes the states before each chunk; first: [B * H, K, V]. Returns the last state.
    """
    decay = decay.expand(-1, added.shape[1], -1, -1)
    order = range(added.shape[1])
    for n in reversed(order) if reverse else order:
        after = torch.addcmul(added[:, n], decay[:, n], first)
        added[:, n] = first
        first = after
    return first
