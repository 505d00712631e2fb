"""The states between chunks of gated linear attention, computed chunk after chunk and stored.

`walk` computes S, the states before each chunk, or, from the last chunk to the first, G, the
gradients of the states after each chunk:

    S' = decay S + (decay to the end * k)^T v,  G' = decay G + (decay from the start * q)^T d_output

If there are too few heads to fill the GPU, time is split into segments. A first launch computes the
effect of each segment on a state, as a decay and a total. In a second launch each segment starts
from the state after the previous segments.
"""

import triton
import triton.language as tl

from .._device.math import exp_of_decays, one_minus_exp
from .._device.products import operand, product, sum_columns
from .._runtime import search
from .._runtime.framework import run
from .._runtime.launch import Array, Launch, cdiv
from .linear_attention import (
    candidate_blocks,
    even_split,
    load_tokens,
    locate_segment,
    real_tokens,
    state_before_segment,
    store_after_segment,
    walk_segments,
)

_LOG_ZERO = tl.constexpr(-1e4)  # its exponential is 0, and sums of it are finite
BLOCKS = {  # candidates by `short`, the default first
    True: candidate_blocks((64, 128, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3)),
    False: candidate_blocks((64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 2), (32, 64, 4, 2)),
}


@triton.jit
def _applied_decays(log_f, starts):
    """The logarithms of the decays applied to states; finite even where a document starts."""
    log_f = tl.maximum(log_f, _LOG_ZERO, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(starts, _LOG_ZERO, log_f)


@triton.jit
def _load_columns(tensor, row, real, d, D, H):
    """Loads the transpose of `load_tokens`."""
    offsets = row[None, :] * (H * D) + d[:, None]
    return tl.load(tensor + offsets, real[None, :] & (d < D)[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "chunks", "segment_chunks"])
def _walk_kernel(
    k,
    v,
    log_f,
    token_kind,
    initial,
    totals,
    decays,
    states,
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
    SHORT: tl.constexpr,
    PARTS: tl.constexpr,
    REVERSE: tl.constexpr,
    ALL: tl.constexpr,
):
    """Stores the states; if `states` is None, totals and decays of segments, with ALL of the last.

    If REVERSE, k is the queries, and v is the gradient of the output.
    """
    k_tiles = tl.cdiv(K, BLOCK_K)
    tiles = k_tiles * tl.cdiv(V, BLOCK_V)
    tile = tl.program_id(0) % tiles
    place = locate_segment(tiles, chunks, segment_chunks, ALL)
    _, segment, head, _ = place
    b = head // H
    d = tile % k_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    e = tile // k_tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    row = tl.arange(0, CHUNK)
    offsets = d[:, None] * V + e[None, :]
    valid = (d < K)[:, None] & (e < V)[None, :]

    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    decay = tl.full((BLOCK_K,), 1.0, tl.float32)
    if states is not None:
        state = state_before_segment(initial, totals, decays, offsets, valid, place, d, K, V, 1)

    for i in range(segment * segment_chunks, tl.minimum((segment + 1) * segment_chunks, chunks)):
        chunk = chunks - 1 - i if REVERSE else i
        token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
        real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
        if states is not None:
            slot = states + (head * chunks + chunk).to(tl.int64) * K * V
            tl.store(slot + offsets, operand(state, SHORT), valid)
        given_log_f = _load_columns(log_f + token * K, row, real, d, K, H)
        if k is None:
            key = one_minus_exp(given_log_f, not SHORT)
        else:
            key = _load_columns(k + token * K, row, real, d, K, H)
        log_decay = _applied_decays(given_log_f, starts[None, :])
        if REVERSE:
            span = row[:, None] <= row[None, :]
        else:
            span = row[:, None] > row[None, :]
        key *= exp_of_decays(sum_columns(log_decay, span, PARTS), not SHORT)
        chunk_decay = exp_of_decays(tl.sum(log_decay, 1), not SHORT)
        decay *= chunk_decay
        value = load_tokens(v + token * V, row, real, e, V, H)
        state = product(key, value, state * chunk_decay[:, None], SHORT)

    store_after_segment(
        state, decay, final, totals, decays, offsets, valid, place, d, K, V, states is not None
    )


def walk(sizes, k, v, initial, *, log_f, token_kind, parts, reverse=False, ends=True):
    """Returns the states [B, H, chunks, K, V] in the dtype of products, the final one in float32.

    The final state is None unless `ends`. If `reverse`, k is q, v is the gradient of the output,
    `initial` is the gradient of the final state, and the results are gradients of states.
    """
    shape = (sizes.batch, sizes.heads, sizes.chunks, sizes.keys, sizes.values)
    states = Array(shape, "bfloat16" if sizes.short else "float32")
    outputs = states, Array(sizes.state_shape, "float32") if ends else None
    tensors = k, v, log_f, token_kind, initial

    def launch(blocks):
        programs, options = _programs_and_options(sizes, blocks, parts, reverse)
        arguments = sizes, programs, tensors, outputs, options
        return walk_segments(_walk_kernel, *arguments, sum_options={"ALL": False})

    name = "gated_linear_attention states" + " backward" * reverse
    return search.run(name, BLOCKS[sizes.short], launch, (v, k, log_f, initial, token_kind), sizes)


def effect(sizes, k, v, *, log_f, token_kind, parts, reverse=False):
    """Returns the decay [B, H, K] and the total [B, H, K, V] by which all tokens change a state.

    If `reverse`, k is q, v is the gradient of the output, and the state is a gradient of a state.
    """
    blocks = BLOCKS[sizes.short][0]
    programs, options = _programs_and_options(sizes, blocks, parts, reverse)
    segments, segment_chunks, _ = even_split(programs, sizes.chunks)
    inputs = k, v, log_f, token_kind, None
    outputs = *(Array((segments, *shape), "float32") for shape in sizes.sums), None, None
    numbers = *sizes.numbers, sizes.chunks, segment_chunks
    launch = Launch(_walk_kernel, programs * segments, inputs, outputs, numbers, options)
    totals, decays, _, _ = run(launch)
    decay, total = decays[0], totals[0]
    for segment in range(1, segments):
        decay, total = decay * decays[segment], decays[segment][..., None] * total + totals[segment]
    return decay, total


def _programs_and_options(sizes, blocks, parts, reverse):
    """The number of programs of a segment, and the options of a launch."""
    options = {"CHUNK": sizes.chunk, "SHORT": sizes.short, "PARTS": parts, "REVERSE": reverse}
    options |= {"ALL": True, **blocks.options(sizes)}
    programs = sizes.batch * sizes.heads * cdiv(sizes.keys, options["BLOCK_K"])
    return programs * cdiv(sizes.values, options["BLOCK_V"]), options
