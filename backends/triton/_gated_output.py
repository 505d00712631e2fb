"""The output of gated linear attention of bfloat16: what `attend_kernel` computes, sooner.

All levels but the last two are about tokens of the same 16. Those meet block by block: tensors are
[blocks, 16, ...], and each warp multiplies the matrices of its own block, from its own registers.
Such a product waits for no other warp, passes no shared memory, and makes 16 pairs a token, where
one of whole chunks makes 64 and throws most away.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._gated_chunks import recall
from keras_recurrent.backends.triton._gated_levels import (
    beside,
    is_right,
    laid_out,
    place_of_program,
    span,
    to_boundary,
)
from keras_recurrent.backends.triton._gated_states import applied
from keras_recurrent.backends.triton._linear_attention import read, real_tokens
from keras_recurrent.backends.triton._math import exp_of_decays, one_minus_exp
from keras_recurrent.backends.triton._products import ones, operand, product


@triton.jit
def _blocks(x):
    """[CHUNK, D] as [blocks, 16, D]."""
    return tl.reshape(x, (x.shape[0] // 16, 16, x.shape[1]))


@triton.jit
def _chunk(x):
    """[blocks, 16, D] as [CHUNK, D]."""
    return tl.reshape(x, (x.shape[0] * 16, x.shape[2]))


@triton.jit
def _to_boundary(row, level):
    """W, of the tokens of each block, who reach no further at such a level; row: [blocks, 16]."""
    column = (row // 16 * 16)[:, :, None] + tl.arange(0, 16)[None, None, :]
    low, high = span(row, level)
    reached = (column >= low[:, :, None]) & (column < high[:, :, None])
    return operand(tl.where(reached, 1.0, 0.0), True)


@triton.jit
def _earlier_half(row, level):
    """The pairs of a token in a right half and one in the left half beside it."""
    same = row[None, :] >> level + 1 == row[:, None] >> level + 1
    return is_right(row, level)[:, None] & same & (row[None, :] >> level & 1 == 0)


@triton.jit
def _sums(which, first, second, PARTS: tl.constexpr):
    """which (first + second): `sums`, of numbers in their parts."""
    total = tl.dot(which, first)
    if PARTS == 2:
        total = tl.dot(which, second, total)
    return total


@triton.jit(do_not_specialize=["T", "chunks"])
def output_kernel(
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
    PARTS: tl.constexpr,
):
    tile, chunk, head, b, token = place_of_program(T, H, chunks, tl.cdiv(V, BLOCK_V), CHUNK)
    row = tl.arange(0, CHUNK)
    inner = tl.arange(0, 16)
    block = tl.arange(0, CHUNK // 16)
    rows = block[:, None] * 16 + inner[None, :]
    e = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    near = tl.zeros((CHUNK // 16, 16, 16), tl.float32)
    own = tl.zeros((CHUNK // 16, 16), tl.float32)
    weights = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, K, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        query = _blocks(read(q + token * K, row, real, d, K, H))
        logarithm = read(log_f + token * K, row, real, d, K, H)
        if k is None:
            key = _blocks(one_minus_exp(logarithm, False))
        else:
            key = _blocks(read(k + token * K, row, real, d, K, H))
        # Parts first, then blocks: else the compiler makes parts anew for each level.
        logarithm = applied(logarithm, starts[:, None])
        first = operand(logarithm, True)
        second = operand(logarithm - first.to(tl.float32), True)
        firsts, seconds = _blocks(first), _blocks(second)
        one = ones(near)
        place = laid_out(rows, one)
        own += tl.sum(query * one[:, :, None] * key, 2)
        for level in tl.static_range(LEVELS):
            if level <= 4:
                reach = _sums(_to_boundary(rows, level), firsts, seconds, PARTS)
            else:
                reach = to_boundary(row, level, ones(weights))
                reach = _blocks(_sums(reach, first, second, PARTS))
            y = tl.where(is_right(place, level)[:, :, None], query, key)
            y = operand(y * exp_of_decays(reach, False), True)
            if level < 4:
                pairs = product(y, tl.trans(y, 0, 2, 1), tl.zeros_like(near), True)
                near += tl.where(beside(inner, level)[None], pairs, 0.0)
            else:
                y = _chunk(y)
                pairs = product(y, tl.trans(y), tl.zeros_like(weights), True)
                weights += tl.where(_earlier_half(row, level), pairs, 0.0)
    near = tl.where((inner[:, None] == inner[None, :])[None], own[:, :, None], near)
    near = tl.broadcast_to(near[:, :, None, :], (CHUNK // 16, 16, CHUNK // 16, 16))
    near = tl.reshape(near, (CHUNK, CHUNK))
    weights = tl.where(row[:, None] // 16 == row[None, :] // 16, near, weights)
    recall(
        weights, q, k, v, log_f, states, output, row, real, starts, e, token, head, chunk, T, H, K,
        V, chunks, BLOCK_K, CHUNK, True, PARTS, False,
    )  # fmt: skip
