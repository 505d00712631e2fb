"""Chunks of linear attention along the time axis, and groups of chunks.

All chunks of a group are computed together, by matrix products; the groups are computed one after
another. So the temporaries of a group fit the cache, and do not grow with the sequence length.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._common import filled, kind_masks

# Number of elements of an argument in one group.
GROUP_SIZE = 1 << 16


def state_shape(q, k, v, _):
    return q.shape[0], v.shape[2], q.shape[3], v.shape[3]


class Plan(NamedTuple):
    """groups * chunks * size tokens, at least the sequence length; `size` is a power of two."""

    groups: int
    chunks: int
    size: int

    @property
    def tokens(self):
        return self.groups * self.chunks * self.size


def plan(q, v, longest):
    """Returns the `Plan` for chunks of up to `longest` tokens; q: [B, T, G, K]; v: [B, T, H, V]."""
    batch, length = q.shape[:2]
    size = min(longest, 1 << (length - 1).bit_length())
    chunks = -(-length // size)
    room = GROUP_SIZE // (batch * size * max(math.prod(x.shape[2:]) for x in (q, v)))
    groups = -(-chunks // max(1, room))
    return Plan(groups, -(-chunks // groups), size)


def scan_groups(step, carry, tensors, outputs, plan, reverse=False):
    """Calls `step` for one group after another, and writes its results into `outputs`.

    A group is sliced from the tensors and written into the outputs without a full copy: copying and
    allocating memory would be most of the cost of a long sequence on a CPU.

    Args:
        step: a function of `carry`, the index of the group, and the slices [B, N, ...] of the
            tensors and of the outputs that belong to the group. It returns the next carry and the
            new slices of the outputs.
        carry: the carry of the first step.
        tensors: a tree of tensors [B, T, ...]. They are padded with zeros to full groups.
        outputs: a tree of tensors [B, T, ...] of the results' dtypes, padded likewise and
            overwritten.
        reverse: boolean, scans from the last group to the first.

    Returns:
        `(carry, outputs)`.
    """
    length = jax.tree.leaves(tensors)[0].shape[1]
    tensors, outputs = jax.tree.map(lambda x: _padded(x, plan), (tensors, outputs))
    if plan.groups == 1:
        carry, outputs = step(carry, 0, tensors, outputs)
    else:
        size = plan.chunks * plan.size

        def body(i, loop):
            carry, outputs = loop
            group = plan.groups - 1 - i if reverse else i
            tokens = functools.partial(
                jax.lax.dynamic_slice_in_dim, start_index=group * size, slice_size=size, axis=1
            )
            put = functools.partial(
                jax.lax.dynamic_update_slice_in_dim, start_index=group * size, axis=1
            )
            # The barrier makes XLA read the old values once, before they are overwritten. If
            # several fused loops read them, it would copy the whole output in every iteration.
            old = jax.tree.map(lambda y: jax.lax.optimization_barrier(tokens(y)), outputs)
            carry, new = step(carry, group, jax.tree.map(tokens, tensors), old)
            return carry, jax.tree.map(put, outputs, new)

        carry, outputs = jax.lax.fori_loop(0, plan.groups, body, (carry, outputs))
    return carry, jax.tree.map(lambda y: y[:, :length], outputs)


def forward_groups(group, state, tensors, plan):
    """Returns the output [B, T, H, V], in the dtype of v, and the final state.

    Args:
        group: a differentiable function `(state, q, k, v, decay, token_kind) -> (output, state)`
            of the state before a group and of the group's tokens.
        state: the state before the first token.
        tensors: q, k, v, decay and token_kind, [B, T, ...]; all but v may be None.
        plan: the `Plan`.
    """
    v = tensors[2]

    def step(state, _, tokens, __):
        output, state = group(state, *tokens)
        return state, output.astype(v.dtype)

    state, output = scan_groups(step, state, tensors, jnp.zeros_like(v), plan)
    return output, state


def backward_groups(group, state, tensors, plan, d_output, d_state):
    """Returns the gradients of q, k, v and decay, None where they are None, and of `state`.

    Groups are recomputed and differentiated, from the last to the first. `d_output` and `d_state`
    are the gradients of the results of `forward_groups`, which defines the other arguments.
    """

    def state_after(carry, i, tokens, _):
        state, before = carry
        before = jax.lax.dynamic_update_index_in_dim(before, state, i, axis=0)
        return (group(state, *tokens)[1], before), ()

    before = jnp.zeros((plan.groups, *state.shape), state.dtype)
    (_, before), _ = scan_groups(state_after, (state, before), tensors, (), plan)

    def step(d_state, i, tokens, old):
        *inputs, token_kind = tokens
        _, padding = kind_masks(token_kind)
        state = jax.lax.dynamic_index_in_dim(before, i, keepdims=False)
        _, pull_back = jax.vjp(lambda *given: group(*given, token_kind), state, *inputs)
        d_output = filled(old[2], padding, 0).astype(d_state.dtype)
        d_state, *found = pull_back((d_output, d_state))
        return d_state, [None if d is None else filled(d, padding, 0) for d in found]

    # The gradient of v overwrites the output's gradient, which is not read again after its group.
    q, k, _, decay, _ = tensors
    d_q, d_k, d_decay = jax.tree.map(jnp.zeros_like, (q, k, decay))
    outputs = [d_q, d_k, d_output, d_decay]
    d_state, gradients = scan_groups(step, d_state, tensors, outputs, plan, reverse=True)
    return *gradients, d_state


def _padded(x, plan):
    missing = plan.tokens - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x


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
    """a b^T, summed in blocks of 64 terms, which reduces the rounding error."""
    parts = [slice(i, i + 64) for i in range(0, a.shape[-1], 64)]
    return sum(product(a[..., part], transposed(b[..., part])) for part in parts)


def transposed(a):
    return jnp.swapaxes(a, -1, -2)


def states(decay, added, first):
    """S' = decay S + added, chunk by chunk.

    decay: [..., chunks, K, 1], or broadcastable to it; added: [..., chunks, K, V]; first:
    [..., K, V]. Returns the states before each chunk, [..., chunks, K, V], and the last state.
    """
    decay = jnp.broadcast_to(decay, (*decay.shape[:-3], added.shape[-3], *decay.shape[-2:]))

    def step(state, chunk):
        decay, added = chunk
        return decay * state + added, state

    chunks = (jnp.moveaxis(decay, -3, 0), jnp.moveaxis(added, -3, 0))
    last, before = jax.lax.scan(step, first, chunks)
    return jnp.moveaxis(before, 0, -3), last


def decay_products(f):
    """Products of decays within halves of 1, 2, 4 ... tokens and within the chunk.

    Returns `(levels, from_start, to_end)`. A level is a pair for one size of halves: the products
    from the boundary to u, for right halves, and from s to the boundary, for left halves.
    `from_start` has the products from the start of the chunk to u, and `to_end` those from s to
    the end. A product from s excludes f_s: a token's decay does not apply to the token itself.
    """
    from_start, to_end = f, jnp.ones_like(f)
    levels, half = [], 1
    while half < f.shape[-2]:
        p_left, p_right = halves(from_start, half)
        s_left, s_right = halves(to_end, half)
        levels.append((p_right, s_left))
        from_start = joined(p_left, p_left[..., -1:, :] * p_right)
        to_end = joined(s_left * p_right[..., -1:, :], s_right)
        half *= 2
    return levels, from_start, to_end


def halves(x, half):
    """The left and the right halves, [..., C / (2 half), half, K], of x: [..., C, K]."""
    x = x.reshape(*x.shape[:-2], -1, 2, half, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def joined(left, right):
    """The inverse of `halves`."""
    x = jnp.stack([left, right], axis=-3)
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def weights_of_pairs(q, k, levels):
    """Weights a_us for s <= u, [..., C, C], from blocks of one token up to a block of C."""
    weights = jnp.sum(q * k, axis=-1)[..., None, None]
    for from_boundary, to_boundary in levels:
        half = from_boundary.shape[-2]
        right, left = halves(q, half)[1] * from_boundary, halves(k, half)[0] * to_boundary
        weights = weights.reshape(*weights.shape[:-3], -1, 2, half, half)
        above = jnp.concatenate([weights[..., 0, :, :], jnp.zeros_like(weights[..., 0, :, :])], -1)
        below = jnp.concatenate([product(right, transposed(left)), weights[..., 1, :, :]], -1)
        weights = jnp.concatenate([above, below], axis=-2)
    return weights[..., 0, :, :]


def sum_over_pairs(pairs, to_later, from_earlier):
    """The gradient of log f_t, a sum over all pairs s < t <= u, of which f_t is a factor.

    Nothing is subtracted, so the result is as exact as other gradients.

    Args:
        pairs: [..., C, C], the terms of pairs (u, s) within a chunk.
        to_later: [..., C, 1], the terms of u with all tokens before the chunk.
        from_earlier: [..., C, 1], the terms of s with all tokens after the chunk.
    """
    index = jnp.arange(pairs.shape[-1])
    later = (index >= index[:, None]).astype(pairs.dtype)
    inside = jnp.where(index < index[:, None], product(later, pairs), 0)
    total = product(later, to_later) + product(1 - later, from_earlier)
    return total + jnp.sum(inside, axis=-1, keepdims=True)
