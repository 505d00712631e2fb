"""Operands of gated linear attention with their decays applied, for all chunks in one launch.

`gated_output.py` defines Q', K', r, s, A and flags, and computes the output from them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .._device.math import exp_of_decays, exp_of_difference, one_minus_exp
from .._device.products import operand, sum_rows
from .._runtime import search
from .._runtime.framework import run
from .._runtime.launch import Array, Launch, cdiv, like
from .gated_levels import (
    add_pair_weights,
    count_documents,
    finite_decays,
    load_chunk,
    locate_program,
)
from .linear_attention import Blocks, load_tokens, real_tokens

# The lowest sum of a chunk's logarithms for which r and s are half of it. Between two chunks, a
# state is multiplied by exp(g_end - s) of one and exp(r) of the next in one step, which is at least
# 4e-38: if it were 0, a chunk's first tokens would not see the last ones of the chunk before.
LOWEST_SUM = tl.constexpr(-86.0)
# Bits of a flag: pairs need several references in its channels; documents start in its chunk.
SEVERAL, DOCUMENTS = tl.constexpr(1), tl.constexpr(2)
# Candidates, the default first. True: log f is bfloat16 and there are no documents; then 96
# registers nearly suffice, with which five programs run on a multiprocessor. Otherwise many
# registers would be spilled. All candidates have the same tile and number of warps, which determine
# the order in which sums are rounded: the backward must compute the forward's flags.
PREPARE_BLOCKS = {
    True: tuple(Blocks(64, 16, 4, maxnreg=registers) for registers in (96, 112)),
    False: tuple(Blocks(64, 16, 4, maxnreg=registers) for registers in (128, None)),
}
PAIRS_BLOCKS = (Blocks(32, 16, 4, 2),)


@triton.jit(do_not_specialize=["T", "chunks"])
def prepare_kernel(
    inputs,
    queries,
    keys,
    scales,
    flags,
    T,
    H,
    K,
    chunks,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Stores Q', K', exp(r), exp(s - r) and exp(g_end - s), and a flag if A is not Q' K'^T."""
    q, k, log_f, token_kind = inputs
    tiles = tl.cdiv(K, BLOCK_K)
    tile, chunk, head, b, token = locate_program(T, H, chunks, tiles, CHUNK)
    row = tl.arange(0, CHUNK)
    d = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    chunk_index = (head * chunks + chunk).to(tl.int64)
    offsets = row[:, None] * (H * K) + d[None, :]
    valid = (chunk * CHUNK + row < T)[:, None] & (d < K)[None, :]
    log_decay = finite_decays(load_tokens(log_f + token * K, row, real, d, K, H), starts)
    query = load_tokens(q + token * K, row, real, d, K, H)
    end = tl.sum(log_decay, 0)
    several = tl.min(end, 0) < LOWEST_SUM
    reference = tl.where(several, 0.0, 0.5 * end)
    key_reference = tl.where(several, end, reference)
    span = operand(tl.where(row[:, None] >= row[None, :], 1.0, 0.0), True)
    from_start = sum_rows(span, log_decay, PARTS)
    query *= exp_of_difference(from_start, reference[None, :], False)
    if token_kind is not None:
        document, last_document = count_documents(starts)
        query = tl.where((document == 0)[:, None], query, 0.0)
    tl.store(queries + token * K + offsets, operand(query, True), valid)
    if k is None:
        # Loaded again, from a cache: if it stayed in registers, fewer programs would run at a time.
        key = one_minus_exp(load_tokens(log_f + token * K, row, real, d, K, H), False)
    else:
        key = load_tokens(k + token * K, row, real, d, K, H)
    key *= exp_of_difference(-from_start, -key_reference[None, :], False)
    if token_kind is not None:
        key = tl.where((document == last_document)[:, None], key, 0.0)
    tl.store(keys + token * K + offsets, operand(key, True), valid)
    between = exp_of_decays(key_reference - reference, False)
    flag = tl.where(several, SEVERAL, 0).to(tl.int8)
    if token_kind is not None:
        between = tl.where(last_document == 0, between, 0.0)
        flag |= tl.where(last_document > 0, DOCUMENTS, 0).to(tl.int8)
    line = scales + chunk_index * 3 * K + d
    tl.store(line, exp_of_decays(reference, False), d < K)
    tl.store(line + K, between, d < K)
    tl.store(line + 2 * K, exp_of_decays(end - key_reference, False), d < K)
    tl.store(flags + chunk_index * tiles + tile, flag)


@triton.jit
def any_flag(flags, chunk_index, TILES: tl.constexpr):
    """Returns True if any of a chunk's flags is set."""
    flag = tl.load(flags + chunk_index * TILES)
    for tile in tl.static_range(1, TILES):
        flag = tl.maximum(flag, tl.load(flags + chunk_index * TILES + tile))
    return flag != 0


@triton.jit(do_not_specialize=["T", "chunks"])
def pairs_kernel(
    inputs,
    flags,
    pairs,
    T,
    H,
    K,
    chunks,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Stores A of flagged chunks, with its transpose above the diagonal, for the backward."""
    token_kind = inputs[3]
    _tile, chunk, head, b, token = locate_program(T, H, chunks, 1, CHUNK)
    chunk_index = (head * chunks + chunk).to(tl.int64)
    if any_flag(flags, chunk_index, TILES):
        row = tl.arange(0, CHUNK)
        real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
        weights = tl.zeros((CHUNK, CHUNK), tl.float32)
        for start in range(0, K, BLOCK_K):
            d = start + tl.arange(0, BLOCK_K)
            query, key, _log_f, log_decay = load_chunk(
                inputs, token, row, real, starts, d, K, H, True
            )
            weights = add_pair_weights(
                weights, query, key, log_decay, row, LEVELS, True, PARTS, False
            )
        visible = row[:, None] >= row[None, :]
        if token_kind is not None:
            document, _last_document = count_documents(starts)
            visible &= document[:, None] == document[None, :]
        weights = operand(tl.where(visible, weights, 0.0), True)
        weights += tl.trans(tl.where(row[:, None] > row[None, :], weights, 0.0))
        tl.store(pairs + chunk_index * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :], weights)


class Prepared(NamedTuple):
    """The arrays that the kernels of this file store."""

    queries: Any  # Q' and K', [B, T, H, K]
    keys: Any
    scales: Any  # [B, H, chunks, 3, K]
    flags: Any  # [B, H, chunks, tiles]
    pairs: Any  # A plus its transpose above the diagonal, [B, H, chunks * tokens * tokens]


def pairs_array(sizes):
    """The `Array` of A and its transpose, which the forward saves for the backward.

    With heads of 128 channels it has half the size of q; only flagged chunks are filled. If all
    chunks are flagged, computing it again would take twice as long as all other operands.
    """
    return Array((sizes.batch, sizes.heads, sizes.chunks * sizes.chunk * sizes.chunk), "bfloat16")


def prepare(sizes, q, k, *, log_f, token_kind, parts, pairs=None):
    """The `Prepared` operands of the output and the gradients. pairs: saved ones, or None."""
    shape = sizes.batch, sizes.heads, sizes.chunks
    tensors = q, k, log_f, token_kind
    scales_array = Array((*shape, 3, sizes.keys), "float32")
    numbers = *sizes.numbers[:3], sizes.chunks

    def options_of(blocks):
        options = {"CHUNK": sizes.chunk, "PARTS": parts, **blocks.options(sizes)}
        del options["BLOCK_V"]
        return options

    def launch_preparation(blocks):
        options = options_of(blocks)
        tiles = cdiv(sizes.keys, options["BLOCK_K"])
        outputs = like(q), like(q), scales_array, Array((*shape, tiles), "int8")
        programs = sizes.programs * tiles
        return run(Launch(prepare_kernel, programs, (tensors,), outputs, numbers, options))

    name = "gated_linear_attention preparation"
    # parts is 1 where log f is bfloat16.
    candidates = PREPARE_BLOCKS[parts == 1 and token_kind is None]
    queries, keys, scales, flags = search.run(name, candidates, launch_preparation, tensors, sizes)
    if pairs is not None:
        return Prepared(queries, keys, scales, flags, pairs)

    def launch_pairs(blocks):
        options = options_of(blocks) | {"LEVELS": sizes.levels, "TILES": flags.shape[3]}
        inputs, outputs = (tensors, flags), (pairs_array(sizes),)
        return run(Launch(pairs_kernel, sizes.programs, inputs, outputs, numbers, options))

    name = "gated_linear_attention pairs"
    (pairs,) = search.run(name, PAIRS_BLOCKS, launch_pairs, tensors, sizes)
    return Prepared(queries, keys, scales, flags, pairs)
