"""The output of gated linear attention for bfloat16, in three kernels that store no state.

`prepare_kernel` computes for all chunks at once what decays make of queries and keys. With g the
sums of log f from the chunk's start up to each token, and g_end that of the whole chunk,

    Q' = exp(g - r) * Q,  K' = exp(s - g) * K

`stream_kernel` goes through the chunks of a head one after the other and keeps some columns of the
state S in registers, transposed, as products take it. With A the weights of pairs of tokens,

    O = Q' (exp(r) S) + A V,  S' = exp(g_end - s) (exp(s) S + K'^T V)

Where one reference serves all pairs of a chunk (`_gated_levels.py`), r = s = g_end / 2 and A is
Q' K'^T. Channels that decay too much for that take r = 0 and s = g_end, so that no exponent is
above 0, and their chunk is flagged: it finds A in memory, where `pairs_kernel` stores it.

A document that starts inside a chunk sees neither S nor earlier tokens, of which none goes into S':
their rows of Q' and K' are 0, and the chunk is flagged, too. Where heads are too few to fill the
GPU, time is cut into segments.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton import _search
from keras_recurrent.backends.triton._framework import run
from keras_recurrent.backends.triton._gated_levels import (
    RADIUS,
    add_pair_weights,
    count_documents,
    load_chunk,
    locate_program,
)
from keras_recurrent.backends.triton._launch import Array, Launch, like
from keras_recurrent.backends.triton._linear_attention import (
    Blocks,
    real_tokens,
    segments_of,
    walk_segments,
)
from keras_recurrent.backends.triton._math import exp_of_decays, exp_of_difference
from keras_recurrent.backends.triton._products import operand, product, sum_rows

LARGEST_KEYS = 128  # channels: with more, too many products are asynchronous (`_products.py`)
# Candidates, the default first.
PREPARE_BLOCKS = (Blocks(64, 16, 4), Blocks(32, 16, 4), Blocks(64, 16, 8))
PAIRS_BLOCKS = (Blocks(32, 16, 4),)
STREAM_BLOCKS = (Blocks(128, 64, 4, 3), Blocks(128, 64, 4, 2), Blocks(128, 64, 4, 4))


@triton.jit(do_not_specialize=["T", "chunks"])
def prepare_kernel(
    q,
    k,
    log_f,
    token_kind,
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
    """Stores Q', K', exp(r), exp(s - r) and exp(g_end - s), and whether A is not Q' K'^T."""
    tiles = tl.cdiv(K, BLOCK_K)
    tile, chunk, head, b, token = locate_program(T, H, chunks, tiles, CHUNK)
    row = tl.arange(0, CHUNK)
    d = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    place = (head * chunks + chunk).to(tl.int64)
    query, key, _log_f, log_decay = load_chunk(q, k, log_f, token, row, real, starts, d, K, H, True)
    end = tl.sum(log_decay, 0)
    several = tl.min(end, 0) < -2 * RADIUS
    reference = tl.where(several, 0.0, 0.5 * end)
    key_reference = tl.where(several, end, reference)
    span = operand(tl.where(row[:, None] >= row[None, :], 1.0, 0.0), True)
    from_start = sum_rows(span, log_decay, PARTS)
    query *= exp_of_difference(from_start, reference[None, :], False)
    key *= exp_of_difference(-from_start, -key_reference[None, :], False)
    between = exp_of_decays(key_reference - reference, False)
    flag = several.to(tl.int8)
    if token_kind is not None:
        document, last_document = count_documents(starts)
        query = tl.where((document == 0)[:, None], query, 0.0)
        key = tl.where((document == last_document)[:, None], key, 0.0)
        between = tl.where(last_document == 0, between, 0.0)
        flag = tl.maximum(flag, (last_document > 0).to(tl.int8))
    offsets = row[:, None] * (H * K) + d[None, :]
    valid = (chunk * CHUNK + row < T)[:, None] & (d < K)[None, :]
    tl.store(queries + token * K + offsets, operand(query, True), valid)
    tl.store(keys + token * K + offsets, operand(key, True), valid)
    line = scales + place * 3 * K + d
    tl.store(line, exp_of_decays(reference, False), d < K)
    tl.store(line + K, between, d < K)
    tl.store(line + 2 * K, exp_of_decays(end - key_reference, False), d < K)
    tl.store(flags + place * tiles + tile, flag)


@triton.jit
def _any_flag(flags, place, TILES: tl.constexpr):
    """Whether one of a chunk's flags is set."""
    flag = tl.load(flags + place * TILES)
    for tile in tl.static_range(1, TILES):
        flag = tl.maximum(flag, tl.load(flags + place * TILES + tile))
    return flag != 0


@triton.jit(do_not_specialize=["T", "chunks"])
def pairs_kernel(
    q,
    k,
    log_f,
    token_kind,
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
    """Stores A of flagged chunks."""
    _tile, chunk, head, b, token = locate_program(T, H, chunks, 1, CHUNK)
    place = (head * chunks + chunk).to(tl.int64)
    if _any_flag(flags, place, TILES):
        row = tl.arange(0, CHUNK)
        real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
        weights = tl.zeros((CHUNK, CHUNK), tl.float32)
        for start in range(0, K, BLOCK_K):
            d = start + tl.arange(0, BLOCK_K)
            query, key, _log_f, log_decay = load_chunk(
                q, k, log_f, token, row, real, starts, d, K, H, True
            )
            weights = add_pair_weights(
                weights, query, key, log_decay, row, LEVELS, True, PARTS, False
            )
        visible = row[:, None] >= row[None, :]
        if token_kind is not None:
            document, _last_document = count_documents(starts)
            visible &= document[:, None] == document[None, :]
        weights = operand(tl.where(visible, weights, 0.0), True)
        tl.store(pairs + place * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :], weights)


@triton.jit
def _load_tile(tensor, row, num_tokens, d, D, H):
    """[CHUNK, BLOCK_D] as it is; 0 beyond the tensor."""
    offsets = row[:, None] * (H * D) + d[None, :]
    return tl.load(tensor + offsets, (row < num_tokens)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["T", "chunks", "segment_chunks"])
def stream_kernel(
    queries,
    keys,
    v,
    scales,
    flags,
    pairs,
    initial,
    totals,
    decays,
    output,
    final,
    T,
    H,
    K,
    V,
    chunks,
    segment_chunks,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Stores the output; if it is None, the totals and decays of all segments but the last."""
    tiles = tl.cdiv(V, BLOCK_V)
    segments = tl.cdiv(chunks, segment_chunks)
    computed = segments
    if output is None:
        computed = segments - 1
    segment = tl.program_id(0) // tiles % computed
    head = tl.program_id(0) // tiles // computed
    heads = tl.num_programs(0) // tiles // computed
    b = head // H
    row = tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    valid = (e < V)[:, None] & (d < K)[None, :]
    offsets = d[None, :] * V + e[:, None]

    state = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    decay = tl.full((BLOCK_K,), 1.0, tl.float32)
    if output is not None:
        if initial is not None:
            state = tl.load(initial + head.to(tl.int64) * K * V + offsets, valid, other=0.0)
            state = state.to(tl.float32)
        if totals is not None:
            for s in range(segment):
                line = (s * heads + head).to(tl.int64) * K
                segment_decay = tl.load(decays + line + d, d < K, other=0.0)
                total = tl.load(totals + line * V + offsets, valid, other=0.0)
                state = segment_decay[None, :] * state + total

    scale = tl.full((BLOCK_K,), 1.0, tl.float32)  # by which the state is to be multiplied
    for chunk in range(
        segment * segment_chunks, tl.minimum((segment + 1) * segment_chunks, chunks)
    ):
        token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
        place = (head * chunks + chunk).to(tl.int64)
        num_tokens = T - chunk * CHUNK
        line = scales + place * 3 * K + d
        before = tl.load(line, d < K, other=0.0)
        between = tl.load(line + K, d < K, other=0.0)
        behind = tl.load(line + 2 * K, d < K, other=0.0)
        decay *= before * between * behind
        scale *= before
        state *= scale[None, :]
        scale = behind
        value = _load_tile(v + token * V, row, num_tokens, e, V, H)
        key = _load_tile(keys + token * K, row, num_tokens, d, K, H)
        if output is not None:
            query = _load_tile(queries + token * K, row, num_tokens, d, K, H)
            result = tl.zeros((CHUNK, BLOCK_V), tl.float32)
            result = product(query, tl.trans(operand(state, True)), result, True)
            weights = product(query, tl.trans(key), tl.zeros((CHUNK, CHUNK), tl.float32), True)
            # Of chunks that are not flagged, memory holds anything here.
            stored = tl.load(pairs + place * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :])
            weights = tl.where(row[:, None] >= row[None, :], weights, 0.0)
            weights = tl.where(_any_flag(flags, place, TILES), stored.to(tl.float32), weights)
            result = product(weights, value, result, True)
            pointers = output + token * V + row[:, None] * (H * V) + e[None, :]
            tl.store(pointers, result, (row < num_tokens)[:, None] & (e < V)[None, :])
        state = product(tl.trans(value), key, state * between[None, :], True)

    state *= scale[None, :]
    if output is None:
        line = (segment * heads + head).to(tl.int64) * K
        tl.store(totals + line * V + offsets, state, valid)
        tl.store(decays + line + d, decay, d < K)
    elif segment == segments - 1:
        tl.store(final + head.to(tl.int64) * K * V + offsets, state, valid)


def prepare(sizes, q, k, *, log_f, token_kind, parts):
    """Q' and K' [B, T, H, K], scales [B, H, chunks, 3, K], flags [B, H, chunks, tiles]; and A."""
    shape = sizes.batch, sizes.heads, sizes.chunks
    tensors = q, k, log_f, token_kind
    scales = Array((*shape, 3, sizes.keys), "float32")
    numbers = *sizes.numbers[:3], sizes.chunks

    def options_of(blocks):
        options = {"CHUNK": sizes.chunk, "PARTS": parts, **blocks.options(sizes)}
        del options["BLOCK_V"]
        return options

    def launch_preparation(blocks):
        options = options_of(blocks)
        tiles = triton.cdiv(sizes.keys, options["BLOCK_K"])
        outputs = like(q), like(q), scales, Array((*shape, tiles), "int8")
        programs = sizes.programs * tiles
        return run(Launch(prepare_kernel, programs, tensors, outputs, numbers, options))

    name = "gated_linear_attention preparation"
    found = _search.run(name, PREPARE_BLOCKS, launch_preparation, tensors, sizes)
    flags = found[3]

    def launch_pairs(blocks):
        outputs = (Array((*shape, sizes.chunk, sizes.chunk), "bfloat16"),)
        options = options_of(blocks) | {"LEVELS": sizes.levels, "TILES": flags.shape[3]}
        inputs = *tensors, flags
        return run(Launch(pairs_kernel, sizes.programs, inputs, outputs, numbers, options))

    name = "gated_linear_attention pairs"
    return *found, *_search.run(name, PAIRS_BLOCKS, launch_pairs, tensors, sizes)


def stream(sizes, prepared, v, initial):
    """The output [B, T, H, V] and the final state [B, H, K, V] in float32."""
    queries, keys, *rest = prepared
    tensors = queries, keys, v, *rest, initial
    outputs = like(v), Array(sizes.state_shape, "float32")
    tiles = rest[1].shape[3]

    def launch(blocks):
        options = {"CHUNK": sizes.chunk, "TILES": tiles}
        options |= blocks.options(sizes)
        programs = sizes.batch * sizes.heads * triton.cdiv(sizes.values, options["BLOCK_V"])
        segments, segment_chunks = segments_of(programs, sizes.chunks)
        numbers = *sizes.numbers, sizes.chunks, segment_chunks
        sums = sizes.state_shape, sizes.state_shape[:3]
        return walk_segments(
            stream_kernel, segments, programs, tensors, outputs, sums, numbers, options
        )

    name = "gated_linear_attention output"
    return _search.run(name, STREAM_BLOCKS, launch, tensors, sizes)
