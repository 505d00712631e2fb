"""Chunks of gated linear attention: what tokens take from each other and from the state before.

`_gated_levels` says how pairs of tokens are weighted. Backwards, the pairs' gradients Z give
R = exp(X) * (Z Y), to q in right halves and to k in left ones, and W^T (R * (q or k)) to log f:
sums of what pairs gain, without a subtraction, as exact as the gradients of q and k.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._gated_levels import (
    beside,
    from_boundary,
    is_right,
    laid_out,
    matrix,
    place_of_program,
    read_chunk,
    to_boundary,
)
from keras_recurrent.backends.triton._linear_attention import read, real_tokens
from keras_recurrent.backends.triton._math import exp_of_decays
from keras_recurrent.backends.triton._products import ones, operand, product, sums


@triton.jit
def _meet(y, level, row, weights, SHORT: tl.constexpr):
    """The weights, with those of pairs of tokens in two halves beside each other."""
    y = operand(y, SHORT)
    pairs = product(y, tl.trans(y), tl.zeros_like(weights), SHORT)
    return weights + tl.where(beside(row, level), pairs, 0.0)


@triton.jit
def recall(
    weights, q, k, v, log_f, states, output, row, real, starts, e, token, head, chunk, T, H, K, V,
    chunks, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, SHORT: tl.constexpr, PARTS: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Stores what the weights, of both triangles, take from a chunk, and what is in its state."""
    if REVERSE:
        weights = tl.where(row[:, None] <= row[None, :], weights, 0.0)
    else:
        weights = tl.where(row[:, None] >= row[None, :], weights, 0.0)
    value = read(v + token * V, row, real, e, V, H)
    recalled = tl.zeros((CHUNK, e.shape[0]), tl.float32)
    recalled = product(weights, value, recalled, SHORT)
    one = ones(weights)
    states += (head * chunks + chunk).to(tl.int64) * K * V
    for start in range(0, K, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        query, key, _, logarithm = read_chunk(q, k, log_f, token, row, real, starts, d, K, H, SHORT)
        if REVERSE:
            across = key
            reach = matrix(row[:, None] < row[None, :], one)
        else:
            across = query
            reach = matrix(row[:, None] >= row[None, :], one)
        across *= exp_of_decays(sums(reach, logarithm, PARTS), not SHORT)
        inside = (d < K)[:, None] & (e < V)[None, :]
        state = tl.load(states + d[:, None] * V + e[None, :], inside, other=0.0)
        recalled = product(across, state, recalled, SHORT)
    there = (chunk * CHUNK + row < T)[:, None] & (e < V)[None, :]
    tl.store(output + token * V + row[:, None] * (H * V) + e[None, :], recalled, there)


@triton.jit(do_not_specialize=["T", "chunks"])
def attend_kernel(
    q,
    k,
    v,
    log_f,
    token_kind,
    states,
    output,
    T,
    H,
    K,
    V,
    chunks,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    SHORT: tl.constexpr,
    PARTS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The output, or, if REVERSE, the gradient of the values, from that of the output as v."""
    tile, chunk, head, b, token = place_of_program(T, H, chunks, tl.cdiv(V, BLOCK_V), CHUNK)
    row = tl.arange(0, CHUNK)
    e = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    weights = tl.zeros((CHUNK, CHUNK), tl.float32)
    own = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, K, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        query, key, _, logarithm = read_chunk(q, k, log_f, token, row, real, starts, d, K, H, SHORT)
        one = ones(weights)
        place = laid_out(row, one)
        own += tl.sum(query * one[:, None] * key, 1)
        # Neighbours: the right one has its own decay, the left one none.
        y = tl.where(is_right(place, 0)[:, None], query * exp_of_decays(logarithm, not SHORT), key)
        weights = _meet(y, 0, row, weights, SHORT)
        for level in range(1, LEVELS):
            y = tl.where(is_right(place, level)[:, None], query, key)
            reach = to_boundary(row, level, one)
            y *= exp_of_decays(sums(reach, logarithm, PARTS), not SHORT)
            weights = _meet(y, level, row, weights, SHORT)
    weights = tl.where(row[:, None] == row[None, :], own[:, None], weights)
    recall(
        weights, q, k, v, log_f, states, output, row, real, starts, e, token, head, chunk, T, H, K,
        V, chunks, BLOCK_K, CHUNK, SHORT, PARTS, REVERSE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "chunks"])
def gradient_kernel(
    q,
    k,
    v,
    log_f,
    token_kind,
    d_output,
    states,
    d_states,
    d_q,
    d_k,
    d_log_f,
    T,
    H,
    K,
    V,
    chunks,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    SHORT: tl.constexpr,
    PARTS: tl.constexpr,
    GAIN_PARTS: tl.constexpr,
):
    """The gradients of q, k and log f for some channels of the keys."""
    tile, chunk, head, b, token = place_of_program(T, H, chunks, tl.cdiv(K, BLOCK_K), CHUNK)
    row = tl.arange(0, CHUNK)
    d = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    states += (head * chunks + chunk).to(tl.int64) * K * V
    d_states += (head * chunks + chunk).to(tl.int64) * K * V

    # Of the pair of tokens (u, s), in both triangles of a square.
    of_later = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_earlier = tl.zeros((CHUNK, CHUNK), tl.float32)
    d_query = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    d_key = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    crossing = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, V, BLOCK_V):
        e = start + tl.arange(0, BLOCK_V)
        value = operand(read(v + token * V, row, real, e, V, H), SHORT)
        gradient = operand(read(d_output + token * V, row, real, e, V, H), SHORT)
        inside = (d < K)[:, None] & (e < V)[None, :]
        at = d[:, None] * V + e[None, :]
        state = tl.load(states + at, inside, other=0.0)
        d_state = tl.load(d_states + at, inside, other=0.0)
        of_later = product(gradient, tl.trans(value), of_later, SHORT)
        of_earlier = product(value, tl.trans(gradient), of_earlier, SHORT)
        d_query = product(gradient, tl.trans(state), d_query, SHORT)
        d_key = product(value, tl.trans(d_state), d_key, SHORT)
        crossing += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
    d_pairs = tl.where(row[:, None] >= row[None, :], of_later, of_earlier)
    d_own = tl.sum(tl.where(row[:, None] == row[None, :], d_pairs, 0.0), 1)[:, None]
    one = ones(d_pairs)
    d_pairs = operand(d_pairs, SHORT)

    query, key, given, logarithm = read_chunk(q, k, log_f, token, row, real, starts, d, K, H, SHORT)
    reach = matrix(row[:, None] >= row[None, :], one)
    d_query *= exp_of_decays(sums(reach, logarithm, PARTS), not SHORT)
    reach = matrix(row[:, None] < row[None, :], one)
    d_key *= exp_of_decays(sums(reach, logarithm, PARTS), not SHORT)
    crossing *= exp_of_decays(tl.sum(logarithm, 0), not SHORT)
    reached = matrix(row[:, None] <= row[None, :], one)
    d_logarithm = sums(reached, query * d_query, GAIN_PARTS)
    reached = matrix(row[:, None] > row[None, :], one)
    d_logarithm += sums(reached, key * d_key, GAIN_PARTS)
    d_logarithm += crossing[None, :]
    d_query += d_own * key
    d_key += d_own * query
    for level in range(LEVELS):
        right = is_right(row, level)[:, None]
        reach = to_boundary(row, level, one)
        decay = exp_of_decays(sums(reach, logarithm, PARTS), not SHORT)
        mine = tl.where(right, query, key)
        pairs = tl.where(beside(row, level), d_pairs, 0.0)
        d_mine = product(pairs, mine * decay, tl.zeros((CHUNK, BLOCK_K), tl.float32), SHORT)
        d_mine *= decay
        d_query += tl.where(right, d_mine, 0.0)
        d_key += tl.where(right, 0.0, d_mine)
        d_logarithm += sums(from_boundary(row, level, one), mine * d_mine, GAIN_PARTS)

    at = row[:, None] * (H * K) + d[None, :]
    there = (chunk * CHUNK + row < T)[:, None] & (d < K)[None, :]
    tl.store(d_q + token * K + at, d_query, there)
    if k is None:
        d_logarithm -= d_key * exp_of_decays(given, not SHORT)
    else:
        tl.store(d_k + token * K + at, d_key, there)
    tl.store(d_log_f + token * K + at, tl.where(real[:, None], d_logarithm, 0.0), there)
