"""Chunks of gated linear attention.

Inside a chunk, token u meets an earlier s with the weight sum_k q_u f_{s+1} ... f_u k_s; for a
matrix product the decays must be shared out between q_u and k_s. As in `backends/torch`, the chunk
is halved again and again: where u lies in a right half and s in the left half beside it, q_u takes
the decays from the boundary to u, and k_s those from s to the boundary. The logarithm of either is
a sum along the tokens of one half, so at each level

    X = W log f,  Y = exp(X) * (q in right halves, k in left ones),  Y Y^T

where W is made of 0 and 1, and of the last product the pairs of that level are kept. These are
products of decays only, never quotients, so any decay is safe. Backwards, the pairs' gradients Z
give R = exp(X) * (Z Y), to q in right halves and to k in left ones, and W^T (R * (q or k)) to
log f: sums of what pairs gain, without a subtraction, as exact as the gradients of q and k.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._common import INTERPRETED
from keras_recurrent.backends.triton._gated_states import applied
from keras_recurrent.backends.triton._linear_attention import read, real_tokens
from keras_recurrent.backends.triton._math import exp_of_decays, one_minus_exp
from keras_recurrent.backends.triton._products import ones, operand, product, sums

_PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def _matrix(which, one):
    """A matrix of 0 and 1 from one of False and True; one: `ones`."""
    which = tl.where(which, one[:, None], 0.0)
    if not _PLAIN:
        which = which.to(tl.bfloat16)
    return which


@triton.jit
def _between(row, low, high, one):
    """1 where a column is from `low` of its row on, and below `high`.

    That is min(1, relu(reach - |column - middle|)), exact in bfloat16 for up to 64 tokens, of which
    a GPU computes two at once: half the instructions of two comparisons.
    """
    if _PLAIN:
        return _matrix((row[None, :] >= low[:, None]) & (row[None, :] < high[:, None]), one)
    middle = (one * 0.5 * (low + high - 1)).to(tl.bfloat16)
    reach = (one * 0.5 * (high - low + 1)).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 one, minus, off;
            mov.b32 one, 0x3F803F80;
            mov.b32 minus, 0xBF80BF80;
            fma.rn.bf16x2 off, $2, minus, $1;
            abs.bf16x2 off, off;
            fma.rn.relu.bf16x2 off, off, minus, $3;
            min.bf16x2 $0, off, one;
        }""",
        "=r,r,r,r",
        [row.to(tl.bfloat16)[None, :], middle[:, None], reach[:, None]],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _laid_out(row, one):
    """`row`, laid out as products are, and so what is chosen by it: not anew for each level."""
    return (row * one).to(tl.int32)


@triton.jit
def _right(row, level):
    """Whether a token is in a right half of 2^level."""
    return (row >> level) % 2 == 1


@triton.jit
def _to_boundary(row, level, one):
    """W: which tokens each reaches over, up to itself from the boundary, or on to the boundary."""
    right, begin = _right(row, level), row >> level << level
    low = tl.where(right, begin, row + 1)
    high = tl.where(right, row + 1, begin + (1 << level))
    return _between(row, low, high, one)


@triton.jit
def _from_boundary(row, level, one):
    """The transpose of W."""
    right, begin = _right(row, level), row >> level << level
    low = tl.where(right, row, begin)
    high = tl.where(right, begin + (1 << level), row)
    return _between(row, low, high, one)


@triton.jit
def _beside(row, level):
    """The pairs of tokens in two halves beside each other."""
    return (row[:, None] ^ row[None, :]) & (-1 << level) == 1 << level


@triton.jit
def _meet(y, level, row, weights, SHORT: tl.constexpr):
    """The weights, with those of pairs of tokens in two halves beside each other."""
    y = operand(y, SHORT)
    pairs = product(y, tl.trans(y), tl.zeros_like(weights), SHORT)
    return weights + tl.where(_beside(row, level), pairs, 0.0)


@triton.jit
def _place(T, H, chunks, tiles, CHUNK: tl.constexpr):
    """Of this program: the tile, chunk, number of the head, row of the batch, and first token."""
    tile = tl.program_id(0) % tiles
    chunk = tl.program_id(0) // tiles % chunks
    head = tl.program_id(0) // tiles // chunks
    b = head // H
    token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
    return tile, chunk, head, b, token


@triton.jit
def _read_chunk(
    q, k, log_f, token, row, real, starts, d, K, H, SHORT: tl.constexpr
):  # fmt: skip
    """q, k, log f as given, and the logarithms of the decays applied: [CHUNK, BLOCK_K]."""
    query = read(q + token * K, row, real, d, K, H)
    logarithm = read(log_f + token * K, row, real, d, K, H)
    if k is None:
        key = one_minus_exp(logarithm, not SHORT)
    else:
        key = read(k + token * K, row, real, d, K, H)
    return query, key, logarithm, applied(logarithm, starts[:, None])


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
    tile, chunk, head, b, token = _place(T, H, chunks, tl.cdiv(V, BLOCK_V), CHUNK)
    row = tl.arange(0, CHUNK)
    e = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    weights = tl.zeros((CHUNK, CHUNK), tl.float32)
    own = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, K, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        query, key, _, logarithm = _read_chunk(
            q, k, log_f, token, row, real, starts, d, K, H, SHORT
        )
        one = ones(weights)
        place = _laid_out(row, one)
        own += tl.sum(query * one[:, None] * key, 1)
        # Neighbours: the right one has its own decay, the left one none.
        y = tl.where(_right(place, 0)[:, None], query * exp_of_decays(logarithm, not SHORT), key)
        weights = _meet(y, 0, row, weights, SHORT)
        for level in range(1, LEVELS):
            y = tl.where(_right(place, level)[:, None], query, key)
            reach = _to_boundary(row, level, one)
            y *= exp_of_decays(sums(reach, logarithm, PARTS), not SHORT)
            weights = _meet(y, level, row, weights, SHORT)
    weights = tl.where(row[:, None] == row[None, :], own[:, None], weights)
    if REVERSE:
        weights = tl.where(row[:, None] <= row[None, :], weights, 0.0)
    else:
        weights = tl.where(row[:, None] >= row[None, :], weights, 0.0)

    value = read(v + token * V, row, real, e, V, H)
    recalled = tl.zeros((CHUNK, BLOCK_V), tl.float32)
    recalled = product(weights, value, recalled, SHORT)
    one = ones(weights)
    states += (head * chunks + chunk).to(tl.int64) * K * V
    for start in range(0, K, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        query, key, _, logarithm = _read_chunk(
            q, k, log_f, token, row, real, starts, d, K, H, SHORT
        )
        if REVERSE:
            across = key
            reach = _matrix(row[:, None] < row[None, :], one)
        else:
            across = query
            reach = _matrix(row[:, None] >= row[None, :], one)
        across *= exp_of_decays(sums(reach, logarithm, PARTS), not SHORT)
        inside = (d < K)[:, None] & (e < V)[None, :]
        state = tl.load(states + d[:, None] * V + e[None, :], inside, other=0.0)
        recalled = product(across, state, recalled, SHORT)
    there = (chunk * CHUNK + row < T)[:, None] & (e < V)[None, :]
    tl.store(output + token * V + row[:, None] * (H * V) + e[None, :], recalled, there)


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
    tile, chunk, head, b, token = _place(T, H, chunks, tl.cdiv(K, BLOCK_K), CHUNK)
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

    query, key, given, logarithm = _read_chunk(
        q, k, log_f, token, row, real, starts, d, K, H, SHORT
    )
    reach = _matrix(row[:, None] >= row[None, :], one)
    d_query *= exp_of_decays(sums(reach, logarithm, PARTS), not SHORT)
    reach = _matrix(row[:, None] < row[None, :], one)
    d_key *= exp_of_decays(sums(reach, logarithm, PARTS), not SHORT)
    crossing *= exp_of_decays(tl.sum(logarithm, 0), not SHORT)
    reached = _matrix(row[:, None] <= row[None, :], one)
    d_logarithm = sums(reached, query * d_query, GAIN_PARTS)
    reached = _matrix(row[:, None] > row[None, :], one)
    d_logarithm += sums(reached, key * d_key, GAIN_PARTS)
    d_logarithm += crossing[None, :]
    d_query += d_own * key
    d_key += d_own * query
    for level in range(LEVELS):
        right = _right(row, level)[:, None]
        reach = _to_boundary(row, level, one)
        decay = exp_of_decays(sums(reach, logarithm, PARTS), not SHORT)
        mine = tl.where(right, query, key)
        pairs = tl.where(_beside(row, level), d_pairs, 0.0)
        d_mine = product(pairs, mine * decay, tl.zeros((CHUNK, BLOCK_K), tl.float32), SHORT)
        d_mine *= decay
        d_query += tl.where(right, d_mine, 0.0)
        d_key += tl.where(right, 0.0, d_mine)
        d_logarithm += sums(_from_boundary(row, level, one), mine * d_mine, GAIN_PARTS)

    at = row[:, None] * (H * K) + d[None, :]
    there = (chunk * CHUNK + row < T)[:, None] & (d < K)[None, :]
    tl.store(d_q + token * K + at, d_query, there)
    if k is None:
        d_logarithm -= d_key * exp_of_decays(given, not SHORT)
    else:
        tl.store(d_k + token * K + at, d_key, there)
    tl.store(d_log_f + token * K + at, tl.where(real[:, None], d_logarithm, 0.0), there)
