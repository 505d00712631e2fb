"""The gradients of gated linear attention for bfloat16, from operands prepared for all chunks.

With the names of `gated_output.py`, G the gradient of the state after a chunk, and dA the gradient
of A, which is dO V^T where a later token sees an earlier one:

    dQ' = dO (exp(r) S)^T + dA K',  dK' = V (exp(g_end - s) G)^T + dA^T Q'
    dQ = exp(g - r) dQ',  dK = exp(s - g) dK',  dV = K' (exp(g_end - s) G) + A^T dO

The gradient of log f at a token has four terms:

- from the state before the chunk to this and later queries: sum Q' dQ';
- from earlier keys to the state after the chunk: sum K' dK';
- from the state before the chunk to the state after it: the sum over V of exp(g_end) S G;
- from pairs of an earlier token and this or a later one: the sum of Q' dQ' - K' dK' of pairs from
  the token on. Pairs of two of these tokens cancel exactly, as both terms use the numbers that
  were multiplied.

Backwards in time, `stream_kernel` computes dV and stores exp(g_end - s) G of each chunk; forwards
it stores exp(r) S. `chunk_kernel` then has all it needs for the gradients of a chunk and of some
channels of its keys. Where the flag of these channels is set, it omits pairs, and `flagged_kernel`
adds their contribution. A program of `flagged_kernel` has 32 tokens, half a chunk. For pairs inside
it, it uses references and levels as in `gated_levels.py`; for pairs across the halves, the boundary
between them is the reference, so that no exponent is above 0.
"""

import triton
import triton.language as tl

from .._device.math import exp_of_decays, exp_of_difference
from .._device.products import ones, operand, product, sum_rows
from .._runtime import search
from .._runtime.framework import run
from .._runtime.launch import Launch, cdiv, like
from .gated_chunks import add_pair_gradients
from .gated_levels import (
    as_matrix,
    count_documents,
    document_ends,
    finite_decays,
    load_chunk,
    locate_program,
)
from .gated_operands import SEVERAL, prepare
from .gated_output import MAX_KEYS, load_tile, stream_backward, stream_states
from .linear_attention import Blocks, block, load_tokens, real_tokens

# Products of 64 rows are asynchronous (`products.py`): a loop over values has fewer of them.
BLOCKS = (Blocks(64, 32, 4, 3), Blocks(64, 32, 4, 2))
FLAGGED_BLOCKS = Blocks(64, 64, 4)
HALF = 32  # tokens of half a chunk, whose products are not asynchronous


@triton.jit
def _apply_decays(d_query, d_key, log_decay, flag):
    """The gradients of q and k from those of Q' and K'."""
    end = tl.sum(log_decay, 0)
    several = flag & SEVERAL != 0
    from_start = tl.cumsum(log_decay, 0)
    reference = tl.where(several, 0.0, 0.5 * end)
    d_query *= exp_of_difference(from_start, reference[None, :], False)
    reference = tl.where(several, end, reference)
    d_key *= exp_of_difference(-from_start, -reference[None, :], False)
    return d_query, d_key


@triton.jit(do_not_specialize=["T", "chunks"])
def chunk_kernel(
    queries,
    keys,
    v,
    log_f,
    token_kind,
    scales,
    flags,
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
):
    """Stores the gradients of q, k (if it is not None) and log f, without flagged pairs."""
    tiles = tl.cdiv(K, BLOCK_K)
    tile, chunk, head, b, token = locate_program(T, H, chunks, tiles, CHUNK)
    chunk_index = (head * chunks + chunk).to(tl.int64)
    row = tl.arange(0, CHUNK)
    d = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    inside = row < T - chunk * CHUNK
    flag = tl.load(flags + chunk_index * tiles + tile)

    d_lower = tl.zeros((CHUNK, CHUNK), tl.float32)  # dA
    d_upper = tl.zeros((CHUNK, CHUNK), tl.float32)  # the transpose of dA
    d_query = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    d_key = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    d_decay = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)  # from the state before the chunk
    for start in range(0, V, BLOCK_V):
        e = start + tl.arange(0, BLOCK_V)
        value = load_tile(v + token * V, row, real, e, V, H)
        gradient = load_tile(d_output + token * V, row, real, e, V, H)
        offsets = chunk_index * K * V + e[:, None] * K + d[None, :]
        valid = (e < V)[:, None] & (d < K)[None, :]
        state = tl.load(states + offsets, valid, other=0.0)
        d_state = tl.load(d_states + offsets, valid, other=0.0)
        d_lower = product(gradient, tl.trans(value), d_lower, True)
        d_upper = product(value, tl.trans(gradient), d_upper, True)
        d_query = product(gradient, state, d_query, True)
        d_key = product(value, d_state, d_key, True)
        d_decay += state.to(tl.float32) * d_state.to(tl.float32)

    query = load_tile(queries + token * K, row, inside, d, K, H)
    key = load_tile(keys + token * K, row, inside, d, K, H)
    between = tl.load(scales + (chunk_index * 3 + 1) * K + d, d < K, other=0.0)
    pair_row = tl.where(flag == 0, row, CHUNK)  # a flagged row has an index outside the chunk
    d_diagonal = tl.sum(tl.where(pair_row[:, None] == row[None, :], d_lower, 0.0), 1)[:, None]
    one = ones(d_lower)
    d_lower = operand(tl.where(row[:, None] > pair_row[None, :], d_lower, 0.0), True)
    d_upper = operand(tl.where(pair_row[:, None] < row[None, :], d_upper, 0.0), True)
    d_query = product(d_lower, key, d_query, True)
    d_key_of_pairs = product(d_upper, query, tl.zeros_like(d_key), True)
    takers = as_matrix(row[:, None] > row[None, :], one)
    d_log_decay = (between * tl.sum(d_decay, 0))[None, :]
    d_log_decay += sum_rows(takers, key * d_key, 1)
    takers = as_matrix(row[:, None] <= row[None, :], one)
    d_log_decay += sum_rows(takers, query * d_query - key * d_key_of_pairs, 2)
    d_query += d_diagonal * key
    d_key += d_key_of_pairs + d_diagonal * query

    given_log_f = load_tokens(log_f + token * K, row, real, d, K, H)
    log_decay = finite_decays(given_log_f, starts)
    d_query, d_key = _apply_decays(d_query, d_key, log_decay, flag)
    if token_kind is not None:
        document, last_document = count_documents(starts)
        d_query = tl.where((document == 0)[:, None], d_query, 0.0)
        d_key = tl.where((document == last_document)[:, None], d_key, 0.0)
        d_log_decay = tl.where(starts[:, None], 0.0, d_log_decay)
    offsets = token * K + row[:, None] * (H * K) + d[None, :]
    valid = inside[:, None] & (d < K)[None, :]
    tl.store(d_q + offsets, d_query, valid)
    if d_k is None:
        d_log_decay -= d_key * exp_of_decays(given_log_f, False)
    else:
        tl.store(d_k + offsets, d_key, valid)
    tl.store(d_log_f + offsets, tl.where(real[:, None], d_log_decay, 0.0), valid)


@triton.jit
def _mask_documents(d_weights, d_across, starts, other_starts, later):
    """Sets gradients of pairs in different documents to 0; also returns `document_ends`."""
    document, last_document = count_documents(starts)
    document_end = document_ends(document)
    d_weights = tl.where(document[:, None] == document[None, :], d_weights, 0.0)
    other_document, other_last = count_documents(other_starts)
    meets = document == tl.where(later, 0, last_document)
    other_meets = other_document == tl.where(later, other_last, 0)
    d_across = tl.where(meets[:, None] & other_meets[None, :], d_across, 0.0)
    return d_weights, d_across, document_end


@triton.jit
def _gradients_across_halves(
    d_across, query, key, log_decay, other_query, other_key, other_decay, later, row, one,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and log f of half a chunk, from pairs of its tokens and the other half's.

    d_across: the gradients of the pairs' weights. later: boolean, whether this is the later half.
    """
    # Spans of decays: from the boundary to a token of the later half, or from a token of the
    # earlier half to the boundary.
    forth, back = row[:, None] >= row[None, :], row[:, None] < row[None, :]
    span = as_matrix(tl.where(later, forth, back), one)
    decay = exp_of_decays(sum_rows(span, log_decay, PARTS), False)
    span = as_matrix(tl.where(later, back, forth), one)
    other_decay = exp_of_decays(sum_rows(span, other_decay, PARTS), False)
    across = tl.where(later, other_key, other_query) * other_decay
    d_y = product(d_across, across, tl.zeros_like(query), True) * decay
    d_query = tl.where(later, d_y, 0.0)
    d_key = tl.where(later, 0.0, d_y)
    forth, back = row[:, None] <= row[None, :], row[:, None] > row[None, :]
    takers = as_matrix(tl.where(later, forth, back), one)
    d_log_decay = sum_rows(takers, tl.where(later, query, key) * d_y, 1)
    return d_query, d_key, d_log_decay


@triton.jit
def _store_sum(tensor, given, offsets, valid, x):
    """Stores the sum of a given tensor and x, which may replace the given one."""
    x += tl.load(given + offsets, valid, other=0.0).to(tl.float32)
    tl.store(tensor + offsets, x, valid)


@triton.jit(do_not_specialize=["T", "chunks"])
def flagged_kernel(
    inputs,
    flags,
    d_output,
    given_d_q,
    given_d_k,
    given_d_log_f,
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
    HALF: tl.constexpr,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Adds the contribution of flagged pairs to the gradients of half a chunk's tokens."""
    token_kind, v = inputs[3], inputs[4]
    tiles = tl.cdiv(K, BLOCK_K)
    tile, half, head, b, token = locate_program(T, H, 2 * chunks, tiles, HALF)
    flag = tl.load(flags + (head * chunks + half // 2).to(tl.int64) * tiles + tile)
    if (flag != 0) & (half * HALF < T):
        later = half % 2 == 1
        row = tl.arange(0, HALF)
        d = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        real, starts = real_tokens(half, token_kind, b, T, HALF)
        other = half + tl.where(later, -1, 1)
        other_real, other_starts = real_tokens(other, token_kind, b, T, HALF)
        other_token = token + (other - half) * HALF * H
        # Tokens of the later half are queries for the other half's keys; tokens of the earlier half
        # are keys for the other half's queries.
        if later:
            other_y = v
        else:
            other_y = d_output

        d_lower = tl.zeros((HALF, HALF), tl.float32)
        d_upper = tl.zeros((HALF, HALF), tl.float32)
        d_across = tl.zeros((HALF, HALF), tl.float32)
        for start in range(0, V, BLOCK_V):
            e = start + tl.arange(0, BLOCK_V)
            value = load_tile(v + token * V, row, real, e, V, H)
            gradient = load_tile(d_output + token * V, row, real, e, V, H)
            across = load_tile(other_y + other_token * V, row, other_real, e, V, H)
            d_lower = product(gradient, tl.trans(value), d_lower, True)
            d_upper = product(value, tl.trans(gradient), d_upper, True)
            operand_y = tl.where(later, gradient, value)
            d_across = product(operand_y, tl.trans(across), d_across, True)
        d_weights = tl.where(row[:, None] >= row[None, :], d_lower, d_upper)
        document_end = None
        if token_kind is not None:
            d_weights, d_across, document_end = _mask_documents(
                d_weights, d_across, starts, other_starts, later
            )

        one = ones(d_weights)
        query, key, given_log_f, log_decay = load_chunk(
            inputs, token, row, real, starts, d, K, H, True
        )
        other_query, other_key, _log_f, other_decay = load_chunk(
            inputs, other_token, row, other_real, other_starts, d, K, H, True
        )
        d_query, d_key, d_log_decay = _gradients_across_halves(
            *(d_across, query, key, log_decay, other_query, other_key, other_decay, later, row),
            *(one, PARTS),
        )
        d_query, d_key, d_log_decay = add_pair_gradients(
            d_query, d_key, d_log_decay, d_weights, query, key, log_decay, row, document_end,
            LEVELS, True, PARTS, 1,
        )  # fmt: skip

        if token_kind is not None:
            d_log_decay = tl.where(starts[:, None], 0.0, d_log_decay)
        offsets = token * K + row[:, None] * (H * K) + d[None, :]
        valid = (half * HALF + row < T)[:, None] & (d < K)[None, :]
        _store_sum(d_q, given_d_q, offsets, valid, d_query)
        if inputs[1] is None:
            d_log_decay -= d_key * exp_of_decays(given_log_f, False)
        else:
            _store_sum(d_k, given_d_k, offsets, valid, d_key)
        d_log_decay = tl.where(real[:, None], d_log_decay, 0.0)
        _store_sum(d_log_f, given_d_log_f, offsets, valid, d_log_decay)


def differentiate(sizes, q, k, v, initial, pairs, d_output, d_final, *, log_f, token_kind, parts):
    """The gradients of q, k (None if k is None), v, log f and the initial state."""
    decays = {"log_f": log_f, "token_kind": token_kind, "parts": parts}
    prepared = prepare(sizes, q, k, **decays, pairs=pairs)
    flags = prepared.flags
    d_v, d_states, d_initial = stream_backward(
        sizes, prepared, d_output, d_final, token_kind, initial
    )
    states = stream_states(sizes, prepared, v, initial, token_kind)
    outputs = like(q), None if k is None else like(k), like(log_f)
    numbers = *sizes.numbers, sizes.chunks
    # The number of channels that share a flag.
    width = block(cdiv(sizes.keys, flags.shape[3]), MAX_KEYS)
    tensors = prepared.queries, prepared.keys, v, log_f, token_kind, prepared.scales, flags
    tensors = *tensors, d_output, states, d_states

    def launch(blocks):
        options = {**blocks.options(sizes), "BLOCK_K": width, "CHUNK": sizes.chunk}
        programs = sizes.programs * flags.shape[3]
        return run(Launch(chunk_kernel, programs, tensors, outputs, numbers, options))

    name = "gated_linear_attention gradients"
    chunk_gradients = search.run(name, BLOCKS, launch, tensors, sizes)
    tensors = (q, k, log_f, token_kind, v), flags, d_output
    options = {**FLAGGED_BLOCKS.options(sizes), "BLOCK_K": width}
    options |= {"HALF": HALF, "LEVELS": sizes.levels - 1, "PARTS": parts}
    programs, updates = 2 * sizes.programs * flags.shape[3], ((3, 0), (4, 1), (5, 2))
    if k is None:
        updates = updates[::2]
    inputs = *tensors, *chunk_gradients
    d_q, d_k, d_log_f = run(
        Launch(flagged_kernel, programs, inputs, outputs, numbers, options, updates, in_place=True)
    )
    return d_q, d_k, d_v, d_log_f, d_initial
