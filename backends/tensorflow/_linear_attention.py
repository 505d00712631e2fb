"""Chunks of linear attention, and groups of chunks, as in `backends/jax/_linear_attention.py`."""

import math
from typing import NamedTuple

import tensorflow as tf

from ._common import dense_gradient, differentiate, filled, kind_masks, length_of

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


def compute(group, cut, state, token_kind, **tensors):
    """Returns the output [B, T, H, V] in the dtype of v, and the final state.

    The gradient computes each group once more and differentiates it, from the last to the first.

    Args:
        group: a differentiable function `(state, token_kind, **tensors) -> (output, state)` of the
            state [B, H, K, V] before a group and of the group's tokens.
        cut: the `Plan`.
        state: the state before the first token.
        token_kind: [B, T], perhaps padded to full groups, or None.
        tensors: tensors [B, T, ...], v among them. `group` does not get a tensor that is None.
    """
    names = [name for name, x in tensors.items() if x is not None]
    v, dtype = tensors["v"], state.dtype

    def run_group(state, token_kind, *given):
        return group(state, token_kind, **dict(zip(names, given, strict=True)))

    def forward(state, *inputs):
        output, state = run_group(state, *inputs)
        return state, [tf.cast(output, v.dtype)]

    def state_before(state, *inputs):
        return run_group(state, *inputs)[1], [state]

    def backward(g, token_kind, state, d_output, *given):
        _, padding = kind_masks(token_kind)
        with tf.GradientTape() as tape:
            tape.watch((state, given))
            results = run_group(state, token_kind, *given)
        d_results = filled(d_output, padding, 0), g
        g, gradients = differentiate(tape, results, (state, given), d_results)
        return g, [filled(d, padding, 0) for d in gradients]

    def groups_of(*given):
        return [grouped(x, cut) for x in (token_kind, *given)]

    @tf.custom_gradient
    def run(state, *given):
        final_state, (output,) = scan_groups(forward, state, groups_of(*given), cut, [v.dtype])
        output = ungrouped(output, v)

        def gradient(d_output, d_final):
            kinds, *inputs = groups_of(*given)
            _, (before,) = scan_groups(state_before, state, [kinds, *inputs], cut, [dtype])
            before = tf.transpose(before, [1, 0, 2, 3, 4])
            d_output = grouped(dense_gradient(d_output, output, dtype), cut)
            d_final = dense_gradient(d_final, final_state, dtype)
            tokens, dtypes = [kinds, before, d_output, *inputs], [x.dtype for x in given]
            d_state, found = scan_groups(backward, d_final, tokens, cut, dtypes, reverse=True)
            return d_state, *(ungrouped(d, x) for d, x in zip(found, given, strict=True))

        return (output, final_state), gradient

    return run(state, *(tensors[name] for name in names))


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


def step(q, k, v, decay, state):
    """One token: S' = decay S + k v^T, o = S'^T q.

    q, k: [B, 1, H, K]; v: [B, 1, H, V]; decay: [B, 1, H, K or 1]; state: [B, H, K, V].
    """
    q, k, v, decay = (x[:, 0, :, :, None] for x in (q, k, v, decay))
    state = decay * state + k * tf.linalg.matrix_transpose(v)
    return tf.reduce_sum(q * state, axis=2)[:, None], state


def states(decay, added, first, plan):
    """S' = decay S + added, chunk by chunk.

    decay: [B * H * chunks, K or 1, 1]; added: [B * H * chunks, K, V]; first: [B, H, K, V].
    Returns the states before each chunk, in the shape of `added`, and the last state.
    """
    heads, before, state = first.shape[1], [], first
    decays, additions = (
        tf.unstack(tf.reshape(x, [-1, heads, plan.chunks, *x.shape[1:]]), axis=2)
        for x in (decay, added)
    )
    for decay_n, added_n in zip(decays, additions, strict=True):
        before.append(state)
        state = decay_n * state + added_n
    return tf.reshape(tf.stack(before, axis=2), [-1, *added.shape[1:]]), state


def decay_products(f):
    """`(levels, from_start, to_end)`, as in `backends/jax/_linear_attention.py`."""
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
