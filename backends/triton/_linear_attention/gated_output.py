"""The output of gated linear attention for bfloat16, in three kernels that store no state.

The first kernel of `gated_operands.py` computes for all chunks at once what decays make of queries
and keys. With g the sums of log f from the chunk's start up to each token, and g_end that of the
whole chunk,

    Q' = exp(g - r) * Q,  K' = exp(s - g) * K

`stream_kernel` goes through the chunks of a head one after the other and keeps some columns of the
state S in registers, transposed, as products take it. With A the weights of pairs of tokens,

    O = Q' (exp(r) S) + A V,  S' = exp(g_end - s) (exp(s) S + K'^T V)

Where g_end is at least `LOWEST_SUM` in all channels of a chunk, one reference serves all its pairs
(`gated_levels.py`): r = s = g_end / 2, and A is Q' K'^T. A tile of channels with a lower one takes
r = 0 and s = g_end, so that no exponent is above 0, and its chunk is flagged: it finds A in memory,
where the second kernel of `gated_operands.py` stores it, for the backward, too.

A document that starts inside a chunk sees neither S nor earlier tokens, of which none goes into S':
their rows of Q' and K' are 0, and the chunk is flagged, too. Where heads are too few to fill the
GPU, time is cut into segments.

The same kernel serves the gradients (`gated_gradients.py`): from the last chunk to the first it
computes that of v, and it stores the states between chunks, or their gradients.
"""

import triton
import triton.language as tl

from .._device.products import operand, product
from .._runtime import search
from .._runtime.launch import Array, like
from .gated_operands import any_flag
from .linear_attention import Blocks, gradient_of_state, locate_segment, real_tokens, walk_segments

LARGEST_KEYS = 128  # channels: with more, too many products are asynchronous (`products.py`)
# Candidates, the default first, so that two programs run on a multiprocessor.
BLOCKS = {
    of: tuple(Blocks(128, 64, 4, stages) for stages in candidates)
    for of, candidates in {
        "output": (2, 3, 4),
        "states": (4, 3, 2),
        "gradient of v": (2, 3, 4),
    }.items()
}


@triton.jit
def load_tile(tensor, row, valid, d, D, H):
    """[CHUNK, BLOCK_D] as it is; 0 beyond the tensor and where no token is valid."""
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
    """Stores the output, and the states that it takes, exp(r) S, transposed; None is not stored.

    If REVERSE, from the last chunk to the first: queries are K', keys Q', v the gradient of the
    output, A its transpose, the output that of v, and the states are exp(g_end - s) G. If nothing
    is stored, the totals and decays of all segments but the last are.
    """
    ALL: tl.constexpr = output is not None or states is not None
    tiles = tl.cdiv(V, BLOCK_V)
    segments, segment, head, heads = locate_segment(tiles, chunks, segment_chunks, ALL)
    b = head // H
    row = tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    valid = (e < V)[:, None] & (d < K)[None, :]
    offsets = d[None, :] * V + e[:, None]

    state = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    decay = tl.full((BLOCK_K,), 1.0, tl.float32)
    if ALL:
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
    for i in range(segment * segment_chunks, tl.minimum((segment + 1) * segment_chunks, chunks)):
        chunk = chunks - 1 - i if REVERSE else i
        token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
        place = (head * chunks + chunk).to(tl.int64)
        inside = row < T - chunk * CHUNK
        # Queries and keys of padding are 0, but 0 times a value that is not finite is not.
        real, _starts = real_tokens(chunk, token_kind, b, T, CHUNK)
        line = scales + place * 3 * K + d
        before = tl.load(line + (2 * K if REVERSE else 0), d < K, other=0.0)
        between = tl.load(line + K, d < K, other=0.0)
        behind = tl.load(line + (0 if REVERSE else 2 * K), d < K, other=0.0)
        decay *= before * between * behind
        scale *= before
        state *= scale[None, :]
        scale = behind
        if states is not None:
            slot = states + place * K * V + e[:, None] * K + d[None, :]
            tl.store(slot, operand(state, True), valid)
        value = load_tile(v + token * V, row, real, e, V, H)
        key = load_tile(keys + token * K, row, inside, d, K, H)
        if output is not None:
            query = load_tile(queries + token * K, row, inside, d, K, H)
            result = tl.zeros((CHUNK, BLOCK_V), tl.float32)
            result = product(query, tl.trans(operand(state, True)), result, True)
            weights = product(query, tl.trans(key), tl.zeros((CHUNK, CHUNK), tl.float32), True)
            # Of chunks that are not flagged, memory holds anything here.
            stored = tl.load(pairs + place * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :])
            weights = tl.where(any_flag(flags, place, TILES), stored.to(tl.float32), weights)
            ordered = row[:, None] <= row[None, :] if REVERSE else row[:, None] >= row[None, :]
            weights = tl.where(ordered, weights, 0.0)
            result = product(weights, value, result, True)
            pointers = output + token * V + row[:, None] * (H * V) + e[None, :]
            tl.store(pointers, result, inside[:, None] & (e < V)[None, :])
        state = product(tl.trans(value), key, state * between[None, :], True)

    state *= scale[None, :]
    if not ALL:
        line = (segment * heads + head).to(tl.int64) * K
        tl.store(totals + line * V + offsets, state, valid)
        tl.store(decays + line + d, decay, d < K)
    elif final is not None and segment == segments - 1:
        tl.store(final + head.to(tl.int64) * K * V + offsets, state, valid)


def stream(sizes, prepared, v, initial, token_kind):
    """The output [B, T, H, V] and the final state [B, H, K, V] in float32."""
    outputs = like(v), None, Array(sizes.state_shape, "float32")
    output, _, final = _stream("output", sizes, prepared, v, initial, token_kind, outputs)
    return output, final


def stream_states(sizes, prepared, v, initial, token_kind):
    """exp(r) S of each chunk, [B, H, chunks, V, K]."""
    prepared = prepared._replace(queries=None, pairs=None)
    outputs = None, _states_of(sizes), None
    return _stream("states", sizes, prepared, v, initial, token_kind, outputs)[1]


def stream_back(sizes, prepared, d_output, d_final, token_kind, initial):
    """The gradients of v, of the states, exp(g_end - s) G, as above, and of the initial one.

    d_final: None where it is 0. Where there is no initial state, its gradient is None.
    """
    prepared = prepared._replace(queries=prepared.keys, keys=prepared.queries)
    outputs = like(d_output), _states_of(sizes), gradient_of_state(initial)
    arguments = sizes, prepared, d_output, d_final, token_kind, outputs
    return _stream("gradient of v", *arguments, reverse=True)


def _states_of(sizes):
    return Array((sizes.batch, sizes.heads, sizes.chunks, sizes.values, sizes.keys), "bfloat16")


def _stream(of, sizes, prepared, v, initial, token_kind, outputs, reverse=False):
    queries, keys, *rest = prepared
    tensors = queries, keys, v, token_kind, *rest, initial

    def launch(blocks):
        options = {"CHUNK": sizes.chunk, "TILES": prepared.flags.shape[3], "REVERSE": reverse}
        options |= blocks.options(sizes)
        programs = sizes.batch * sizes.heads * triton.cdiv(sizes.values, options["BLOCK_V"])
        sums = sizes.state_shape, sizes.state_shape[:3]
        return walk_segments(
            stream_kernel, sizes.chunks, programs, tensors, outputs, sums, sizes.numbers, options
        )

    name = f"gated_linear_attention {of}"
    return search.run(name, BLOCKS[of], launch, (v, *tensors), sizes)
