"""The output of gated linear attention for bfloat16: as `attend_kernel` computes it, but faster.

The pairs of tokens of all levels but the last two lie within blocks of 16 tokens. They are computed
block by block, on tensors [blocks, 16, ...], where each warp multiplies the matrices of its own
block from its own registers. Such a product waits for no other warp, uses no shared memory, and
computes 16 pairs for each token; a product of whole chunks computes 64, of which most are unused.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._gated_chunks import store_output
from keras_recurrent.backends.triton._gated_levels import (
    decay_span,
    in_adjacent_halves,
    in_product_layout,
    in_right_half,
    locate_program,
    span_matrix,
)
from keras_recurrent.backends.triton._gated_states import applied_decays
from keras_recurrent.backends.triton._linear_attention import load_tokens, real_tokens
from keras_recurrent.backends.triton._math import exp_of_decays, one_minus_exp
from keras_recurrent.backends.triton._products import ones, operand, product


@triton.jit
def _split_blocks(x):
    """[CHUNK, D] as [blocks, 16, D]."""
    return tl.reshape(x, (x.shape[0] // 16, 16, x.shape[1]))


@triton.jit
def _join_blocks(x):
    """[blocks, 16, D] as [CHUNK, D]."""
    return tl.reshape(x, (x.shape[0] * 16, x.shape[2]))


@triton.jit
def _span_matrix_of_blocks(row, level):
    """W of each block, [blocks, 16, 16], if spans end in blocks. row: [blocks, 16]."""
    column = (row // 16 * 16)[:, :, None] + tl.arange(0, 16)[None, None, :]
    low, high = decay_span(row, level)
    in_span = (column >= low[:, :, None]) & (column < high[:, :, None])
    return operand(tl.where(in_span, 1.0, 0.0), True)


@triton.jit
def _in_earlier_half(row, level):
    """The pairs of a token in a right half and one in the left half beside it."""
    same = row[None, :] >> level + 1 == row[:, None] >> level + 1
    return in_right_half(row, level)[:, None] & same & (row[None, :] >> level & 1 == 0)


@triton.jit
def _sum_rows(mask, first_part, second_part, PARTS: tl.constexpr):
    """`sum_rows` of a tensor that is given as its parts."""
    total = tl.dot(mask, first_part)
    if PARTS == 2:
        total = tl.dot(mask, second_part, total)
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
    tile, chunk, head, b, token = locate_program(T, H, chunks, tl.cdiv(V, BLOCK_V), CHUNK)
    row = tl.arange(0, CHUNK)
    block_row = tl.arange(0, 16)
    block = tl.arange(0, CHUNK // 16)
    rows = block[:, None] * 16 + block_row[None, :]
    e = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    block_weights = tl.zeros((CHUNK // 16, 16, 16), tl.float32)
    diagonal = tl.zeros((CHUNK // 16, 16), tl.float32)
    weights = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, K, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        query = _split_blocks(load_tokens(q + token * K, row, real, d, K, H))
        given_log_f = load_tokens(log_f + token * K, row, real, d, K, H)
        if k is None:
            key = _split_blocks(one_minus_exp(given_log_f, False))
        else:
            key = _split_blocks(load_tokens(k + token * K, row, real, d, K, H))
        # Split into parts, then into blocks: in the other order, the compiler repeats the parts at
        # each level.
        log_decay = applied_decays(given_log_f, starts[:, None])
        first_part = operand(log_decay, True)
        second_part = operand(log_decay - first_part.to(tl.float32), True)
        first_blocks, second_blocks = _split_blocks(first_part), _split_blocks(second_part)
        one = ones(block_weights)
        product_rows = in_product_layout(rows, one)
        diagonal += tl.sum(query * one[:, :, None] * key, 2)
        for level in tl.static_range(LEVELS):
            if level <= 4:
                span = _span_matrix_of_blocks(rows, level)
                log_y = _sum_rows(span, first_blocks, second_blocks, PARTS)
            else:
                span = span_matrix(row, level, ones(weights))
                log_y = _split_blocks(_sum_rows(span, first_part, second_part, PARTS))
            y = tl.where(in_right_half(product_rows, level)[:, :, None], query, key)
            y = operand(y * exp_of_decays(log_y, False), True)
            if level < 4:
                pairs = product(y, tl.trans(y, 0, 2, 1), tl.zeros_like(block_weights), True)
                block_weights += tl.where(in_adjacent_halves(block_row, level)[None], pairs, 0.0)
            else:
                y = _join_blocks(y)
                pairs = product(y, tl.trans(y), tl.zeros_like(weights), True)
                weights += tl.where(_in_earlier_half(row, level), pairs, 0.0)
    on_diagonal = (block_row[:, None] == block_row[None, :])[None]
    block_weights = tl.where(on_diagonal, diagonal[:, :, None], block_weights)
    spread = tl.broadcast_to(block_weights[:, :, None, :], (CHUNK // 16, 16, CHUNK // 16, 16))
    spread = tl.reshape(spread, (CHUNK, CHUNK))
    weights = tl.where(row[:, None] // 16 == row[None, :] // 16, spread, weights)
    store_output(
        weights, q, k, v, log_f, states, output, row, real, starts, e, token, head, chunk, T, H, K,
        V, chunks, BLOCK_K, CHUNK, True, PARTS, False,
    )  # fmt: skip
