"""The output of gated linear attention for bfloat16, in three kernels that store no state.

The first kernel of `gated_operands.py` applies decays to queries and keys, for all chunks in one
launch. With g the sums of log f from the chunk's start up to each token, and g_end the sum over the
whole chunk,

    Q' = exp(g - r) * Q,  K' = exp(s - g) * K

`stream_kernel` goes through the chunks of a head one after the other and keeps some columns of the
state S in registers, transposed, as products expect it. With A the weights of pairs of tokens,

    O = Q' (exp(r) S) + A V,  S' = exp(g_end - s) (exp(s) S + K'^T V)

If g_end is at least `LOWEST_SUM` in all channels of a chunk, one reference serves all its pairs
(`gated_levels.py`): r = s = g_end / 2, and A is Q' K'^T. Otherwise a tile of channels uses r = 0
and s = g_end, so that no exponent is above 0, and its chunk is flagged: A is then read from memory,
where the second kernel of `gated_operands.py` stores it, also for the backward.

A document that starts inside a chunk sees neither S nor earlier tokens, and earlier tokens do not
contribute to S': their rows of Q' and K' are 0, and the chunk is flagged, too. If there are too few
heads to fill the GPU, time is split into segments.

For the gradients (`gated_gradients.py`), `stream_kernel` computes the gradient of v from the last
chunk to the first, and stores the states between chunks, or their gradients.
"""

import triton
import triton.language as tl

from .._device.products import operand, product
from .._runtime import search
from .._runtime.launch import Array, cdiv, like
from .gated_operands import any_flag
from .linear_attention import (
    Blocks,
    gradient_of_state,
    locate_segment,
    real_tokens,
    state_before_segment,
    store_after_segment,
    walk_segments,
)

MAX_KEYS = 128  # channels: with more, too many products are asynchronous (`products.py`)
# Candidates, the default first, so that two programs run on a multiprocessor.
BLOCKS = {
    result: tuple(Blocks(128, 64, 4, stages) for stages in candidates)
    for result, candidates in {
        "output": (2, 3, 4),
        "states": (4, 3, 2),
        "gradient of v": (2, 3, 4),
    }.items()
}


@triton.jit
def load_tile(tensor, row, valid, d, D, H):
    """Loads [CHUNK, BLOCK_D] in the tensor's dtype; 0 beyond the tensor and at invalid tokens."""
    offsets = row[:, None] * (H * D) + d[None, :]
    return tl.load(tensor + offsets, valid[:, None] & (d < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["T", "chunks", "segment_chunks"])
def stream_kernel(
    queries,
    keys,
    v,
    token_kind,
    scales,
    flags,
    pairs,
    initial,
    totals,
    decays,
    output,
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
    TILES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Stores the output, and the states exp(r) S, transposed, from which it is computed.

    An output that is None is not stored. If both are None, the kernel stores the totals and decays
    of all segments but the last.

    If REVERSE, it goes from the last chunk to the first: queries are K', keys are Q', v is the
    gradient of the output, A is transposed, the output is the gradient of v, and the states are
    exp(g_end - s) G.
    """
    ALL: tl.constexpr = output is not None or states is not None
    tiles = tl.cdiv(V, BLOCK_V)
    place = locate_segment(tiles, chunks, segment_chunks, ALL)
    _, segment, head, _ = place
    b = head // H
    row = tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    valid = (e < V)[:, None] & (d < K)[None, :]
    offsets = d[None, :] * V + e[:, None]

    state = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    decay = tl.full((BLOCK_K,), 1.0, tl.float32)
    if ALL:
        state = state_before_segment(initial, totals, decays, offsets, valid, place, d, K, V, 0)

    scale = tl.full((BLOCK_K,), 1.0, tl.float32)  # pending factor of the state
    for i in range(segment * segment_chunks, tl.minimum((segment + 1) * segment_chunks, chunks)):
        chunk = chunks - 1 - i if REVERSE else i
        token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
        chunk_index = (head * chunks + chunk).to(tl.int64)
        inside = row < T - chunk * CHUNK
        # Queries and keys of padding are 0, but 0 times an infinite value or NaN is NaN.
        real, _starts = real_tokens(chunk, token_kind, b, T, CHUNK)
        line = scales + chunk_index * 3 * K + d
        before = tl.load(line + (2 * K if REVERSE else 0), d < K, other=0.0)
        between = tl.load(line + K, d < K, other=0.0)
        after = tl.load(line + (0 if REVERSE else 2 * K), d < K, other=0.0)
        decay *= before * between * after
        scale *= before
        state *= scale[None, :]
        scale = after
        if states is not None:
            slot = states + chunk_index * K * V + e[:, None] * K + d[None, :]
            tl.store(slot, operand(state, True), valid)
        value = load_tile(v + token * V, row, real, e, V, H)
        key = load_tile(keys + token * K, row, inside, d, K, H)
        if output is not None:
            query = load_tile(queries + token * K, row, inside, d, K, H)
            result = tl.zeros((CHUNK, BLOCK_V), tl.float32)
            result = product(query, tl.trans(operand(state, True)), result, True)
            weights = product(query, tl.trans(key), tl.zeros((CHUNK, CHUNK), tl.float32), True)
            # For chunks without a flag, the loaded numbers are arbitrary.
            stored = tl.load(
                pairs + chunk_index * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :]
            )
            weights = tl.where(any_flag(flags, chunk_index, TILES), stored.to(tl.float32), weights)
            ordered = row[:, None] <= row[None, :] if REVERSE else row[:, None] >= row[None, :]
            weights = tl.where(ordered, weights, 0.0)
            result = product(weights, value, result, True)
            pointers = output + token * V + row[:, None] * (H * V) + e[None, :]
            tl.store(pointers, result, inside[:, None] & (e < V)[None, :])
        state = product(tl.trans(value), key, state * between[None, :], True)

    state *= scale[None, :]
    store_after_segment(state, decay, final, totals, decays, offsets, valid, place, d, K, V, ALL)


def stream(sizes, prepared, v, initial, token_kind):
    """The output [B, T, H, V] and the final state [B, H, K, V] in float32."""
    outputs = like(v), None, Array(sizes.state_shape, "float32")
    output, _, final = _stream("output", sizes, prepared, v, initial, token_kind, outputs)
    return output, final


def stream_states(sizes, prepared, v, initial, token_kind):
    """exp(r) S of each chunk, [B, H, chunks, V, K]."""
    prepared = prepared._replace(queries=None, pairs=None)
    outputs = None, _states_array(sizes), None
    return _stream("states", sizes, prepared, v, initial, token_kind, outputs)[1]


def stream_backward(sizes, prepared, d_output, d_final, token_kind, initial):
    """The gradients of v, of the states (exp(g_end - s) G, transposed), and of the initial state.

    d_final: None if it is 0. Without an initial state, its gradient is None.
    """
    prepared = prepared._replace(queries=prepared.keys, keys=prepared.queries)
    outputs = like(d_output), _states_array(sizes), gradient_of_state(initial)
    arguments = sizes, prepared, d_output, d_final, token_kind, outputs
    return _stream("gradient of v", *arguments, reverse=True)


def _states_array(sizes):
    return Array((sizes.batch, sizes.heads, sizes.chunks, sizes.values, sizes.keys), "bfloat16")


def _stream(result, sizes, prepared, v, initial, token_kind, outputs, reverse=False):
    queries, keys, *rest = prepared
    tensors = queries, keys, v, token_kind, *rest, initial

    def launch(blocks):
        options = {"CHUNK": sizes.chunk, "TILES": prepared.flags.shape[3], "REVERSE": reverse}
        options |= blocks.options(sizes)
        programs = sizes.batch * sizes.heads * cdiv(sizes.values, options["BLOCK_V"])
        return walk_segments(stream_kernel, sizes, programs, tensors, outputs, options)

    name = f"gated_linear_attention {result}"
    return search.run(name, BLOCKS[result], launch, (v, *tensors), sizes)
