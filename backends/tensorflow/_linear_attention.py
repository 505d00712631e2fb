"""Chunks of linear attention along the time axis, and groups of chunks.

All chunks of a group are computed together, by matrix products; the groups are computed one after
another. So the temporaries of a group fit the cache, and do not grow with the sequence length.
"""

from typing import NamedTuple

import tensorflow as tf

from ._common import length_of

# Number of elements of an argument in one group.
_GROUP_SIZE = 1 << 17
# Number of tokens in a group, and of chunks, whose loop is unrolled.
_MOST_TOKENS = 512
_TOKENS_OF_UNKNOWN_BATCH = 128
_MOST_CHUNKS = 32


class Plan(NamedTuple):
    """groups * chunks * size tokens, at least the sequence length; `size` is a power of two."""

    groups: int | tf.Tensor
    chunks: int
    size: int


def plan(q, v, longest):
    """Returns the `Plan` for chunks of up to `longest` tokens; q: [B, T, H, K]; v: [B, T, H, V]."""
    batch, length, heads, width = q.shape
    size = longest if length is None else min(longest, 1 << (length - 1).bit_length())
    if batch is None:
        most = max(1, _TOKENS_OF_UNKNOWN_BATCH // size)
    else:
        room = _GROUP_SIZE // max(1, batch * heads * size * max(width, v.shape[3]))
        most = min(_MOST_CHUNKS, _MOST_TOKENS // size, max(1, room))
    chunks = -(-length_of(q) // size)
    groups = -(-chunks // most)
    return Plan(groups, most if length is None else -(-chunks // groups), size)


def grouped(x, plan):
    """[B, T, ...] as [B, groups, tokens of a group, ...], padded with zeros."""
    if x is None:
        return None
    tokens = plan.chunks * plan.size
    missing = plan.groups * tokens - length_of(x)
    if x.shape[1] is None or missing:
        x = tf.pad(x, [[0, 0], [0, missing], *[[0, 0]] * (len(x.shape) - 2)])
    return tf.reshape(x, [tf.shape(x)[0], plan.groups, tokens, *x.shape[2:]])


def scan_groups(step, state, inputs, plan, dtypes, reverse=False):
    """Calls `step(state, *inputs of a group) -> (state, outputs)` for one group after another.

    Returns the last state and each output of all groups, [B, tokens, H, ...].
    """
    if isinstance(plan.groups, int) and plan.groups == 1:
        state, found = step(state, *(None if x is None else tf.squeeze(x, 1) for x in inputs))
        return state, [x[None] for x in found]

    def body(i, state, outputs):
        group = plan.groups - 1 - i if reverse else i
        state, found = step(state, *(None if x is None else x[:, group] for x in inputs))
        written = [array.write(group, x) for array, x in zip(outputs, found, strict=True)]
        return i + 1, state, written

    arrays = [tf.TensorArray(dtype, plan.groups) for dtype in dtypes]
    start = (tf.constant(0), state, arrays)
    _, state, arrays = tf.while_loop(lambda i, *_: i < plan.groups, body, start)
    return state, [array.stack() for array in arrays]


def ungrouped(y, like):
    """[groups, B, tokens, H, K] as [B, T, H, K], in the shape of `like`."""
    y = tf.transpose(y, [1, 0, 2, 3, 4])
    y = tf.reshape(y, [tf.shape(y)[0], -1, *like.shape[2:]])[:, : length_of(like)]
    y.set_shape(like.shape)
    return y


def chunked(x, plan):
    """One group, [B, tokens, H, K], as [B * H * chunks, size, K]."""
    heads, width = x.shape[2:]
    x = tf.reshape(x, [-1, plan.chunks, plan.size, heads, width])
    return tf.reshape(tf.transpose(x, [0, 3, 1, 2, 4]), [-1, plan.size, width])


def unchunked(y, heads, plan):
    """The inverse of `chunked`."""
    y = tf.reshape(y, [-1, heads, plan.chunks, plan.size, y.shape[-1]])
    y = tf.transpose(y, [0, 2, 3, 1, 4])
    return tf.reshape(y, [-1, plan.chunks * plan.size, heads, y.shape[-1]])


def inner_products(a, b):
    """a b^T, summed in blocks of 64 terms, which reduces the rounding error."""
    parts = [slice(i, i + 64) for i in range(0, a.shape[-1], 64)]
    return tf.add_n([tf.matmul(a[..., p], b[..., p], transpose_b=True) for p in parts])


def states(decay, added, first, plan, reverse=False):
    """S' = decay S + added, chunk by chunk, starting from the last if `reverse`.

    decay: [B * H * chunks, K or 1, 1]; added: [B * H * chunks, K, V]; first: [B * H, K, V].
    Returns the states before each chunk, in the shape of `added`, and the last state.
    """
    decays, additions = (
        tf.unstack(tf.reshape(x, [-1, plan.chunks, *x.shape[1:]]), axis=1) for x in (decay, added)
    )
    before, state = [], first
    steps = list(zip(decays, additions, strict=True))
    for decay_n, added_n in reversed(steps) if reverse else steps:
        before.append(state)
        state = decay_n * state + added_n
    before = tf.stack(before[::-1] if reverse else before, axis=1)
    return tf.reshape(before, [-1, *added.shape[1:]]), state
