"""Chunks of gated linear attention: outputs and gradients, given the states between chunks.

`gated_levels.py` defines the weights of pairs of tokens inside a chunk. In the backward, with Z the
gradients of these weights, a level computes R = exp(X) * (Z Y), the gradient of q in right halves
and of k in left halves, and W^T (R * (q or k)), the gradient of log f: sums without a subtraction,
which are as exact as the gradients of q and k. Inside a block with one reference, the gradient of
log f is the sum of q * d_q - k * d_k from a token to the end of its block, or of its document.
"""

import triton
import triton.language as tl

from .._device.math import exp_of_decays
from .._device.products import ones, operand, product, sum_rows
from .gated_levels import (
    add_pair_weights,
    as_matrix,
    block_pair_mask,
    count_documents,
    document_ends,
    find_reference_blocks,
    interval_matrix,
    level_pair_mask,
    load_chunk,
    locate_program,
    right_half_mask,
    span_matrix,
    span_matrix_transposed,
)
from .linear_attention import load_tokens, real_tokens


@triton.jit(do_not_specialize=["T", "chunks"])
def attend_kernel(
    inputs,
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
    """Stores the output; if REVERSE, the gradient of v, where v is the gradient of the output."""
    token_kind, v = inputs[3], inputs[4]
    tile, chunk, head, b, token = locate_program(T, H, chunks, tl.cdiv(V, BLOCK_V), CHUNK)
    row = tl.arange(0, CHUNK)
    e = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    weights = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, K, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        query, key, _, log_decay = load_chunk(inputs, token, row, real, starts, d, K, H, SHORT)
        weights = add_pair_weights(
            weights, query, key, log_decay, row, LEVELS, SHORT, PARTS, REVERSE
        )
    visible = row[:, None] <= row[None, :] if REVERSE else row[:, None] >= row[None, :]
    reads = real
    if token_kind is not None:
        document, last_document = count_documents(starts)
        visible &= document[:, None] == document[None, :]
        reads &= document == (last_document if REVERSE else 0)
    weights = tl.where(visible, weights, 0.0)
    one = ones(weights)
    if REVERSE:
        span = as_matrix(row[:, None] < row[None, :], one)
    else:
        span = as_matrix(row[:, None] >= row[None, :], one)
    value = load_tokens(v + token * V, row, real, e, V, H)
    result = tl.zeros((CHUNK, BLOCK_V), tl.float32)
    result = product(weights, value, result, SHORT)
    states += (head * chunks + chunk).to(tl.int64) * K * V
    for start in range(0, K, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        query, key, _, log_decay = load_chunk(inputs, token, row, real, starts, d, K, H, SHORT)
        decay = exp_of_decays(sum_rows(span, log_decay, PARTS), not SHORT)
        reader = (key if REVERSE else query) * tl.where(reads[:, None], decay, 0.0)
        valid = (d < K)[:, None] & (e < V)[None, :]
        state = tl.load(states + d[:, None] * V + e[None, :], valid, other=0.0)
        result = product(reader, state, result, SHORT)
    valid = (chunk * CHUNK + row < T)[:, None] & (e < V)[None, :]
    tl.store(output + token * V + row[:, None] * (H * V) + e[None, :], result, valid)


@triton.jit
def add_pair_gradients(
    d_query, d_key, d_log_decay, d_weights, query, key, log_decay, row, document_end,
    LEVELS: tl.constexpr, SHORT: tl.constexpr, PARTS: tl.constexpr, GAIN_PARTS: tl.constexpr,
):  # fmt: skip
    """Adds the gradients through pairs of tokens to those of q, k and log f, for some channels.

    d_weights: the gradients of the pairs' weights, at [later token, earlier token] and transposed.
    document_end: the index after each token's document; None for a single document.
    """
    d_diagonal = tl.sum(tl.where(row[:, None] == row[None, :], d_weights, 0.0), 1)[:, None]
    one = ones(d_weights)
    d_weights = operand(d_weights, SHORT)
    d_query += d_diagonal * key
    d_key += d_diagonal * query
    first_level = 0
    if SHORT:
        first_level, from_reference = find_reference_blocks(row, log_decay, LEVELS, PARTS)
        query_decay = exp_of_decays(from_reference, False)
        key_decay = exp_of_decays(-from_reference, False)
        in_block = block_pair_mask(row, first_level)
        zeros = tl.zeros_like(query)
        # Both gains use the rounded operands, so that pairs of two later tokens cancel.
        query_y = operand(query * query_decay, True)
        key_y = operand(key * key_decay, True)
        pairs = tl.where(in_block & (row[:, None] > row[None, :]), d_weights, 0.0)
        d_y = product(pairs, key_y, zeros, True)
        d_query += d_y * query_decay
        gain = query_y * d_y
        pairs = tl.where(in_block & (row[:, None] < row[None, :]), d_weights, 0.0)
        d_y = product(pairs, query_y, zeros, True)
        d_key += d_y * key_decay
        gain -= key_y * d_y
        # Pairs of two later tokens cancel; pairs of an earlier and a later token remain.
        end = ((row >> first_level) + 1) << first_level
        if document_end is not None:
            end = tl.minimum(end, document_end)
        gains = interval_matrix(row, row, end, one)
        d_log_decay += sum_rows(gains, gain, GAIN_PARTS + 1)
    for level in range(first_level, LEVELS):
        right = right_half_mask(row, level)[:, None]
        span = span_matrix(row, level, one)
        decay = exp_of_decays(sum_rows(span, log_decay, PARTS), not SHORT)
        undecayed_y = tl.where(right, query, key)
        pairs = tl.where(level_pair_mask(row, level), d_weights, 0.0)
        d_y = product(pairs, undecayed_y * decay, tl.zeros_like(query), SHORT)
        d_y *= decay
        d_query += tl.where(right, d_y, 0.0)
        d_key += tl.where(right, 0.0, d_y)
        takers = span_matrix_transposed(row, level, one)
        d_log_decay += sum_rows(takers, undecayed_y * d_y, GAIN_PARTS)
    return d_query, d_key, d_log_decay


@triton.jit(do_not_specialize=["T", "chunks"])
def gradient_kernel(
    inputs,
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
    """Stores the gradients of q, k and log f for some channels of the keys."""
    token_kind, v = inputs[3], inputs[4]
    tile, chunk, head, b, token = locate_program(T, H, chunks, tl.cdiv(K, BLOCK_K), CHUNK)
    row = tl.arange(0, CHUNK)
    d = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    states += (head * chunks + chunk).to(tl.int64) * K * V
    d_states += (head * chunks + chunk).to(tl.int64) * K * V

    # The gradients of the weights, at [later token, earlier token] and transposed.
    d_lower = tl.zeros((CHUNK, CHUNK), tl.float32)
    d_upper = tl.zeros((CHUNK, CHUNK), tl.float32)
    d_query = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    d_key = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    d_chunk_decay = tl.zeros((BLOCK_K,), tl.float32)  # from the state before the chunk
    for start in range(0, V, BLOCK_V):
        e = start + tl.arange(0, BLOCK_V)
        value = operand(load_tokens(v + token * V, row, real, e, V, H), SHORT)
        gradient = operand(load_tokens(d_output + token * V, row, real, e, V, H), SHORT)
        valid = (d < K)[:, None] & (e < V)[None, :]
        offsets = d[:, None] * V + e[None, :]
        state = tl.load(states + offsets, valid, other=0.0)
        d_state = tl.load(d_states + offsets, valid, other=0.0)
        d_lower = product(gradient, tl.trans(value), d_lower, SHORT)
        d_upper = product(value, tl.trans(gradient), d_upper, SHORT)
        d_query = product(gradient, tl.trans(state), d_query, SHORT)
        d_key = product(value, tl.trans(d_state), d_key, SHORT)
        d_chunk_decay += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
    d_weights = tl.where(row[:, None] >= row[None, :], d_lower, d_upper)
    document_end = None
    if token_kind is not None:
        document, last_document = count_documents(starts)
        document_end = document_ends(document)
        d_weights = tl.where(document[:, None] == document[None, :], d_weights, 0.0)
        d_query = tl.where((document == 0)[:, None], d_query, 0.0)
        d_key = tl.where((document == last_document)[:, None], d_key, 0.0)
        d_chunk_decay = tl.where(last_document == 0, d_chunk_decay, 0.0)
    one = ones(d_weights)

    query, key, given_log_f, log_decay = load_chunk(
        inputs, token, row, real, starts, d, K, H, SHORT
    )
    span = as_matrix(row[:, None] >= row[None, :], one)
    d_query *= exp_of_decays(sum_rows(span, log_decay, PARTS), not SHORT)
    span = as_matrix(row[:, None] < row[None, :], one)
    d_key *= exp_of_decays(sum_rows(span, log_decay, PARTS), not SHORT)
    d_chunk_decay *= exp_of_decays(tl.sum(log_decay, 0), not SHORT)
    takers = as_matrix(row[:, None] <= row[None, :], one)
    d_log_decay = sum_rows(takers, query * d_query, GAIN_PARTS)
    takers = as_matrix(row[:, None] > row[None, :], one)
    d_log_decay += sum_rows(takers, key * d_key, GAIN_PARTS)
    d_log_decay += d_chunk_decay[None, :]
    d_query, d_key, d_log_decay = add_pair_gradients(
        d_query, d_key, d_log_decay, d_weights, query, key, log_decay, row, document_end, LEVELS,
        SHORT, PARTS, GAIN_PARTS,
    )  # fmt: skip

    if token_kind is not None:
        d_log_decay = tl.where(starts[:, None], 0.0, d_log_decay)
    offsets = row[:, None] * (H * K) + d[None, :]
    valid = (chunk * CHUNK + row < T)[:, None] & (d < K)[None, :]
    tl.store(d_q + token * K + offsets, d_query, valid)
    if inputs[1] is None:
        d_log_decay -= d_key * exp_of_decays(given_log_f, not SHORT)
    else:
        tl.store(d_k + token * K + offsets, d_key, valid)
    tl.store(d_log_f + token * K + offsets, tl.where(real[:, None], d_log_decay, 0.0), valid)
