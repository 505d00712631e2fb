"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2405.17381 (Lightning Attention), and 2023, arXiv:2307.14995
(TransNormerLLM): inside a chunk (Q K^T * M) V with M_us = decay^(u - s), across chunks Q S.
Padding does not decay the state: exponents, such as u - s in M, count the real tokens between two
tokens, and M is 0 where a document starts between them.

A program computes the chunks of a head one after the other and keeps some columns of S in
registers: no state is stored. The gradients have the same form, and the same kernel computes them,
with (d_O, V, K, S^T) in place of (Q, K, V, S) for Q, and backwards in time, with G the gradient of
the state, with (K, Q, d_O, G) for V and (V, d_O, Q, G^T) for K.

If there are too few heads to fill the GPU, time is split into segments, and these into subsegments.
A first launch computes the effect of each subsegment on a state, as a decay and a total; in a
second launch each segment starts from the state after the previous subsegments. The first launch
reads only tokens that the state at the end of a segment depends on: few tokens for most heads, but
all of them for heads without decay. Subsegments, shorter than segments, spread these over the GPU.
"""

import triton
import triton.language as tl

from ._device import common
from ._device.math import exp_of_decays
from ._device.products import operand, product
from ._device.tokens import CONTINUES, PADDING, STARTS
from ._linear_attention.linear_attention import (
    TimeSplit,
    candidate_blocks,
    load_tokens,
    locate_segment,
    max_segments,
    real_tokens,
    sizes_of,
    unsupported_reason,
    walk_segments,
)
from ._linear_attention.linear_attention_step import step
from ._runtime import search
from ._runtime.framework import operation, zeros_like
from ._runtime.launch import Array, cdiv, dtype_name, like
from ._runtime.operation import Operation

# Candidates by (`short`, heads are wider than 128 channels), the default first. The state,
# [K, BLOCK_V], takes at most 64 registers of a thread. The parts into which float32 is split take
# many more, so its wide heads have one candidate. Tiles of 128×32 were compiled wrongly for heads
# of 66 channels. Tiles with 2 pipeline stages leave shared memory for a second program on a
# multiprocessor: with enough programs, they come first.
BLOCKS = {
    (True, False): candidate_blocks((128, 64, 4, 4), (128, 64, 4, 3), (128, 64, 4, 2)),
    (True, True): candidate_blocks(
        (256, 32, 8, 4), (256, 32, 8, 3), (256, 32, 8, 2), (256, 16, 8, 4)
    ),
    (False, False): candidate_blocks((128, 32, 8), (128, 16, 8), (128, 64, 8)),
    (False, True): candidate_blocks((256, 32, 8)),
}
_SHORTEST_SUBSEGMENT = 8  # chunks
_MAX_SUBSEGMENTS = 32  # in all segments together, at least one each
_FORGOTTEN = tl.constexpr(104.0)  # exp(-104) is 0 in float32; times any number it is below 1e-6
_KINDS = tl.constexpr(4096)  # tokens whose kinds are loaded at a time


@triton.jit
def _power(exponent, log_decay, FINE: tl.constexpr):
    """decay ** exponent, 1 if the exponent is 0: 0 * log_decay would be NaN for a decay of 0."""
    return exp_of_decays(tl.where(exponent == 0, 0.0, exponent * log_decay), FINE)


@triton.jit
def _count_tokens(real, starts, row, num_tokens, token_kind):
    """The numbers of real tokens and of document starts up to each token, and in the whole chunk.

    num_tokens: the number of tokens in the chunk. Without kinds, the counts of tokens are the same
    for every chunk, and are computed once.
    """
    if token_kind is None:
        count, document, num_real, last_document = row + 1, row * 0, num_tokens, 0
    else:
        count, document = tl.cumsum(real.to(tl.int32), 0), tl.cumsum(starts.to(tl.int32), 0)
        num_real, last_document = tl.max(count, 0), tl.max(document, 0)
    return count, document, num_real, last_document


@triton.jit
def _find_remembered_start(
    start, end, log_decay, token_kind, b, T, chunks, CHUNK: tl.constexpr, REVERSE: tl.constexpr
):
    """The first of the chunks from `start` to `end` on which the state after them depends.

    Earlier chunks have decayed to 0, or belong to an earlier document.
    """
    reach = tl.minimum(1.0 / tl.maximum(-log_decay, 1e-9) * _FORGOTTEN, T)  # tokens
    first = start
    if token_kind is not None:
        t = (chunks - end if REVERSE else start) * CHUNK
        length = tl.minimum((end - start) * CHUNK, T - t)
        for n in range(0, length, _KINDS):
            index = n + tl.arange(0, _KINDS)
            pointers = token_kind + b.to(tl.int64) * T + t + index
            kind = tl.load(pointers, index < length, other=CONTINUES)
            reach += tl.sum((kind == PADDING).to(tl.int32), 0)
            chunk = (t + index) // CHUNK
            chunk = chunks - 1 - chunk if REVERSE else chunk
            first = tl.maximum(first, tl.max(tl.where(kind == STARTS, chunk, start), 0))
    return tl.maximum(first, end - 1 - (reach / CHUNK).to(tl.int32))


@triton.jit
def _state_before_segment(
    state, initial, totals, decays, offsets, valid, segment, subsegments, heads, head, K, V
):  # fmt: skip
    """The state before a segment, from the initial one, or from `state`, which is 0."""
    if initial is not None:
        state = tl.load(initial + head.to(tl.int64) * K * V + offsets, valid, other=0.0)
        state = state.to(tl.float32)
    if totals is not None:
        for s in tl.range(segment * subsegments, num_stages=3):
            line = s * heads + head
            total = tl.load(totals + line.to(tl.int64) * K * V + offsets, valid, other=0.0)
            state = tl.load(decays + line) * state + total
    return state


@triton.jit
def _attend(
    query,
    key,
    value,
    state,
    state_decay,
    row,
    count,
    document,
    log_decay,
    SHORT: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The output of a chunk, from its tokens and the state before it; after it, if REVERSE.

    state_decay: the decay of the state up to each token; count, document: see `_count_tokens`.
    """
    weights = tl.zeros((row.shape[0], row.shape[0]), tl.float32)
    weights = product(query, tl.trans(key), weights, SHORT)
    visible = document[:, None] == document[None, :]
    if REVERSE:
        visible &= row[:, None] <= row[None, :]
    else:
        visible &= row[:, None] >= row[None, :]
    distance = tl.abs(count[:, None] - count[None, :])
    weights = tl.where(visible, weights * _power(distance, log_decay, not SHORT), 0.0)
    result = tl.zeros(value.shape, tl.float32)
    result = product(query, state, result, SHORT) * state_decay[:, None]
    return product(weights, value, result, SHORT)


@triton.jit(do_not_specialize=["T", "subsegments", "chunks", "segment_chunks"])
def _walk_kernel(
    q,
    k,
    v,
    log_decay,
    token_kind,
    initial,
    totals,
    decays,
    output,
    final,
    T,
    H,
    K,
    V,
    state_k,
    state_v,
    subsegments,
    chunks,
    segment_chunks,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Stores the output of each token, from the tokens up to it, or, if REVERSE, from it on.

    If `output` is None, stores the totals and decays of the subsegments of all segments but the
    last: `subsegments` per segment.
    state_k, state_v: the strides of states along K and along V.
    final: None if it is not needed.
    """
    tiles = tl.cdiv(V, BLOCK_V)
    segments, part, head, heads = locate_segment(
        tiles, chunks, segment_chunks, output is not None, subsegments
    )
    b = head // H
    row = tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    valid = (d < K)[:, None] & (e < V)[None, :]
    offsets = d[:, None] * state_k + e[None, :] * state_v
    head_log_decay = tl.load(log_decay + head % H).to(tl.float32)

    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    decay = 1.0
    if output is None:
        # The decays of skipped chunks do not matter: later decays reduce their product to 0.
        end = (part + 1) * (segment_chunks // subsegments)
        start = _find_remembered_start(
            part * (segment_chunks // subsegments),
            (part // subsegments + 1) * segment_chunks,
            *(head_log_decay, token_kind, b, T, chunks, CHUNK, REVERSE),
        )
    else:
        start, end = part * segment_chunks, tl.minimum((part + 1) * segment_chunks, chunks)
        state = _state_before_segment(
            state, initial, totals, decays, offsets, valid, part, subsegments, heads, head, K, V
        )

    for i in range(start, end):
        chunk = chunks - 1 - i if REVERSE else i
        token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
        real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
        num_tokens = tl.minimum(T - chunk * CHUNK, CHUNK)
        count, document, num_real, last_document = _count_tokens(
            real, starts, row, num_tokens, token_kind
        )
        decay_from_start = tl.where(document == 0, _power(count, head_log_decay, not SHORT), 0.0)
        num_later = tl.maximum(num_real - count, 0)
        decay_to_end = tl.where(
            document == last_document, _power(num_later, head_log_decay, not SHORT), 0.0
        )
        key = operand(load_tokens(k + token * K, row, real, d, K, H), SHORT)
        value = operand(load_tokens(v + token * V, row, real, e, V, H), SHORT)
        if output is not None:
            query = operand(load_tokens(q + token * K, row, real, d, K, H), SHORT)
            result = _attend(
                *(query, key, value, state, decay_to_end if REVERSE else decay_from_start),
                *(row, count, document, head_log_decay, SHORT, REVERSE),
            )
            pointers = output + token * V + row[:, None] * (H * V) + e[None, :]
            tl.store(pointers, result, (row < num_tokens)[:, None] & (e < V)[None, :])
        value_decay = decay_from_start if REVERSE else decay_to_end
        chunk_decay = tl.where(last_document == 0, _power(num_real, head_log_decay, not SHORT), 0.0)
        decay *= chunk_decay
        value = value.to(tl.float32) * value_decay[:, None]
        state = product(tl.trans(key), value, state * chunk_decay, SHORT)

    if output is None:
        line = part * heads + head
        tl.store(totals + line.to(tl.int64) * K * V + offsets, state, valid)
        tl.store(decays + line, decay)
    elif final is not None and part == segments - 1:
        tl.store(final + head.to(tl.int64) * K * V + offsets, state, valid)


def _choose_split(programs, chunks, concurrent=1):
    """The fastest `TimeSplit`, with `concurrent` programs on a multiprocessor.

    Adding the total of a subsegment takes a program a fourth of the time of a chunk.
    """

    def time(segments):
        waves = cdiv(programs * segments, concurrent * common.MULTIPROCESSORS)
        return waves * cdiv(chunks, segments) + segments / 4

    segments = min(range(1, max_segments(programs, chunks) + 1), key=time)
    chunks_per_segment = cdiv(chunks, segments)
    subsegments = max(
        1, min(_MAX_SUBSEGMENTS // segments, chunks_per_segment // _SHORTEST_SUBSEGMENT)
    )
    segment_chunks = cdiv(chunks_per_segment, subsegments) * subsegments
    return TimeSplit(cdiv(chunks, segment_chunks), segment_chunks, subsegments)


def _walk(
    q, k, v, initial, dtype, *, log_decay, token_kind, transposed=False, reverse=False, ends=True
):  # fmt: skip
    """The output in `dtype`, and the final state, which is None unless `ends`.

    transposed: the initial state is [B, H, V, K], and there is no final state.
    """
    wide = q.shape[3] > 128
    # Float32 is split into parts, for which only short chunks leave enough registers.
    sizes = sizes_of(q, k, v, chunk=32 if wide else 64, chunk_of_float32=16)
    batch, heads, keys, values = sizes.state_shape
    state_shape = (batch, heads, values, keys) if transposed else sizes.state_shape
    tensors = q, k, v, log_decay, token_kind, initial
    final = Array(state_shape, "float32") if ends and not transposed else None
    outputs = like(v).astype(dtype), final

    candidates = BLOCKS[sizes.short, wide]

    def programs_of(blocks):
        return batch * heads * cdiv(values, blocks.options(sizes)["BLOCK_V"])

    programs = programs_of(candidates[0])
    if programs > common.MULTIPROCESSORS or _choose_split(programs, sizes.chunks).segments > 1:
        candidates = tuple(sorted(candidates, key=lambda blocks: blocks.num_stages))

    def launch(blocks):
        options = {"CHUNK": sizes.chunk, "SHORT": sizes.short, "REVERSE": reverse}
        options |= blocks.options(sizes)
        programs = programs_of(blocks)
        split = _choose_split(programs, sizes.chunks, concurrent=2 if blocks.num_stages == 2 else 1)
        strides = (1, keys) if transposed else (values, 1)
        return walk_segments(
            *(_walk_kernel, sizes, programs, tensors, outputs, options),
            numbers=(*strides, split.subsegments),
            sums=(state_shape, (batch, heads)),
            split=split,
            sum_options={"num_stages": BLOCKS[sizes.short, wide][0].num_stages},
        )

    name = "lightning_attention" + " transposed" * transposed + " backward" * reverse
    return search.run(name, candidates, launch, tensors, sizes)


def results(q, k, v, log_decay, initial_state, token_kind):
    return like(v), Array(sizes_of(q, k, v).state_shape, "float32")


def forward(q, k, v, log_decay, initial_state, token_kind):
    decays = {"log_decay": log_decay, "token_kind": token_kind}
    if q.shape[1] == 1:
        return step(sizes_of(q, k, v), q, k, v, initial_state, **decays)
    return _walk(q, k, v, initial_state, dtype_name(v), **decays)


def backward(q, k, v, log_decay, initial_state, token_kind, output, d_output, d_final):
    decays = {"log_decay": log_decay, "token_kind": token_kind}
    mirrored, ends = {**decays, "reverse": True}, initial_state is not None
    d_q, _ = _walk(d_output, v, k, initial_state, dtype_name(q), **decays, transposed=True)
    d_v, d_initial = _walk(k, q, d_output, d_final, dtype_name(v), **mirrored, ends=ends)
    d_k, _ = _walk(v, d_output, q, d_final, dtype_name(k), **mirrored, transposed=True)
    return d_q, d_k, d_v, zeros_like(log_decay), d_initial, None


lightning_attention = operation(
    Operation("lightning_attention", forward, results, backward, unsupported_reason)
)
