"""S_t = diag(f_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head, chunk by chunk.

Inside a chunk token u attends to an earlier token s with the weight q_u f_{s+1} ... f_u k_s. The
chunk is halved recursively. For u in a right half and s in the adjacent left half, q_u is
multiplied by the decays from the boundary to u, and k_s by those from s to the boundary.
"""

import numpy as np
from keras import ops

from keras_recurrent.portable import _loop, _opset_27
from keras_recurrent.portable._common import state_or_zeros
from keras_recurrent.portable._scan import (
    merge_blocks,
    power_of_two,
    scan,
    split_blocks,
    states_before,
)

CHUNK = 64
CHUNKS_PER_BLOCK = 8  # states are large


def linear_attention(q, k, v, log_f, initial_state, starts, padding):
    """q, k: [B, T, H, K]; v: [B, T, H, V]; log_f: [B, T, H, K or 1], all of one dtype.

    At padding k is 0 and log_f is 0. starts: [B, T, 1, 1] or None. Returns ([B, T, H, V],
    [B, H, K, V]).
    """
    batch, length, heads, key_size = ops.shape(q)
    value_size = v.shape[3]
    state = state_or_zeros(initial_state, (batch, heads, key_size, value_size), q.dtype)
    if _opset_27.is_active():
        return _opset_27.linear_attention(q, k, v, log_f, state, starts)
    keep = None if starts is None else ops.cast(~starts, q.dtype)
    if q.shape[1] == 1 or _loop.is_needed(q):
        f = ops.exp(log_f) if keep is None else ops.exp(log_f) * keep
        if q.shape[1] != 1:
            return _loop.loop(step, state, (q, k, v, f))
        state, output = step(state, *(x[:, 0] for x in (q, k, v, f)))
        return output[:, None], state
    if keep is None:
        keep = ops.ones((batch, length, 1, 1), q.dtype)
    forget = ops.broadcast_to(1.0 - keep, (batch, length, heads, 1))
    size = min(CHUNK, power_of_two(length))
    q, k, v, log_f, forget = (_split_heads(x, size) for x in (q, k, v, log_f, forget))
    rows, chunks = batch * heads, -(-length // size)
    f = ops.exp(log_f) * (1.0 - forget)  # 1 after the last token, where both are 0
    from_start, to_end, weights = _chunk_products(q, k, f)
    added = ops.matmul(ops.transpose(k * to_end, (0, 2, 1)), v)
    added = ops.reshape(added, (rows, chunks, key_size, value_size))
    total = ops.reshape(ops.copy(from_start[:, -1]), (rows, chunks, log_f.shape[-1], 1))
    first = ops.reshape(state, (rows, key_size, value_size))
    after = scan(total, added, first, block=CHUNKS_PER_BLOCK)
    before = ops.reshape(states_before(after, first), (-1, key_size, value_size))
    output = ops.matmul(q * from_start, before) + ops.matmul(weights, v)
    output = merge_blocks(output, rows, length)
    output = ops.reshape(output, (batch, heads, length, value_size))
    return (
        ops.transpose(output, (0, 2, 1, 3)),
        ops.reshape(after[:, -1], (batch, heads, key_size, value_size)),
    )


def step(state, q, k, v, f):
    """Computes one token: q, k, f [B, H, K], v [B, H, V]. Returns the next state and the output."""
    state = next_state(state, k, v, f)
    return state, ops.sum(q[..., None] * state, axis=2)


def next_state(state, k, v, f):
    return f[..., None] * state + k[..., None] * v[:, :, None]


def _split_heads(x, size):
    """Reshapes [B, T, H, K] to chunks [B H N, C, K]."""
    batch, length, heads, width = ops.shape(x)
    x = ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (batch * heads, length, width))
    return split_blocks(x, size)


def _chunk_products(q, k, f):
    """Returns products of f from the start of a chunk and to its end, and the weights [.., C, C].

    A product to the end excludes the f of its first token.
    """
    size, width = f.shape[1:]
    from_start, to_end = f, ops.ones_like(f)
    diagonal = ops.expand_dims(ops.sum(q * k, axis=-1), -1)
    index = np.arange(size)
    weights = ops.where(index[:, None] == index, diagonal, ops.zeros_like(diagonal))
    half = 1
    while half < size:
        halves = (-1, size // (2 * half), 2, half, width)
        p, s = ops.reshape(from_start, halves), ops.reshape(to_end, halves)
        p_left, p_right, s_left, s_right = p[:, :, 0], p[:, :, 1], s[:, :, 0], s[:, :, 1]

        def join_halves(left, right):
            return ops.reshape(ops.stack([left, right], axis=2), (-1, size, width))

        to_right = join_halves(ops.zeros_like(p_left), p_right)
        from_left = join_halves(s_left, ops.zeros_like(s_right))
        between = ops.matmul(q * to_right, ops.transpose(k * from_left, (0, 2, 1)))
        block = index // (2 * half)
        weights = weights + ops.where(block[:, None] == block, between, ops.zeros_like(between))
        from_start = join_halves(p_left, p_right * p_left[:, :, -1:])
        to_end = join_halves(s_left * p_right[:, :, -1:], s_right)
        half *= 2
    return from_start, to_end, weights
