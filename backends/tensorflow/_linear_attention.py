"""Chunks of linear attention along the time axis, and groups of chunks.

All chunks of a group are computed together, by matrix products; the groups are computed one after
another. So the temporaries of a group fit the cache, and do not grow with the sequence length.
"""

import math
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
    """Returns the `Plan` for chunks of up to `longest` tokens; q: [B, T, G, K]; v: [B, T, H, V]."""
    batch, length = q.shape[:2]
    size = longest if length is None else min(longest, 1 << (length - 1).bit_length())
    if batch is None:
        most = max(1, _TOKENS_OF_UNKNOWN_BATCH // size)
    else:
        room = _GROUP_SIZE // max(1, batch * size * max(math.prod(x.shape[2:]) for x in (q, v)))
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


def decay_products(f):
    """Products of decays within halves of 1, 2, 4 ... tokens and within the chunk.

    Returns `(levels, from_start, to_end)`. A level is a pair for one size of halves: the products
    from the boundary to u, for right halves, and from s to the boundary, for left halves.
    `from_start` has the products from the start of the chunk to u, and `to_end` those from s to
    the end. A product from s excludes f_s: a token's decay does not apply to the token itself.
    """
    from_start, to_end = f, tf.ones_like(f)
    levels, half = [], 1
    while half < f.shape[1]:
        p_left, p_right = halves(from_start, half)
        s_left, s_right = halves(to_end, half)
        levels.append((p_right, s_left))
        from_start = joined(p_left, p_left[:, :, -1:] * p_right)
        to_end = joined(s_left * p_right[:, :, -1:], s_right)
        half *= 2
    return levels, from_start, to_end


def halves(x, half):
    """The left and the right halves, [..., C / (2 half), half, K], of x: [..., C, K]."""
    _, length, width = x.shape
    return tf.unstack(tf.reshape(x, [-1, length // (2 * half), 2, half, width]), axis=2)


def joined(left, right):
    """The inverse of `halves`."""
    _, blocks, half, width = left.shape
    return tf.reshape(tf.stack([left, right], axis=2), [-1, 2 * blocks * half, width])


def weights_of_pairs(q, k, levels):
    """Weights a_us for s <= u, [..., C, C], from blocks of one token up to a block of C."""
    weights = tf.reduce_sum(q * k, axis=-1)[:, :, None, None]
    for from_boundary, to_boundary in levels:
        half = from_boundary.shape[2]
        (k_left, _), (_, q_right) = halves(k, half), halves(q, half)
        between = product(q_right * from_boundary, k_left * to_boundary, transpose_b=True)
        left, right = weights[:, ::2], weights[:, 1::2]
        above = tf.concat([left, tf.zeros_like(left)], axis=-1)
        weights = tf.concat([above, tf.concat([between, right], axis=-1)], axis=-2)
    return weights[:, 0]


def product(a, b, **transposed):
    """`tf.matmul`, but element-wise, which is faster, for one channel and blocks of one token."""
    if "transpose_b" in transposed and b.shape[-1] == 1:
        return a * tf.linalg.matrix_transpose(b)
    if b.shape[-2] > 1:
        return tf.matmul(a, b, **transposed)
    return tf.reduce_sum(a * b, axis=-1, keepdims=True) if "transpose_b" in transposed else a * b


def sum_over_pairs(pairs, to_later, from_earlier):
    """The gradient of log f_t, as in `backends/jax/_linear_attention.py`."""
    index = tf.range(pairs.shape[-1])
    later = tf.cast(index >= index[:, None], pairs.dtype)
    inside = (1 - later) * tf.matmul(later, pairs)
    total = tf.matmul(later, to_later) + tf.matmul(1 - later, from_earlier)
    return total + tf.reduce_sum(inside, axis=-1, keepdims=True)
