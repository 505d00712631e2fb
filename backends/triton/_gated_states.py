"""The states between chunks of gated linear attention, chunk after chunk, in device memory.

`walk` makes the states before each chunk, S, or, from the last chunk to the first, the gradients G
of the states after each chunk:

    S' = decay S + (decay to the end * k)^T v,  G' = decay G + (decay from the start * q)^T d_output

Where heads are too few to fill the GPU, the walk is cut into segments: what each does to a state,
a decay and a total, is computed for all at once, and then each enters with what those before it do.
"""

import torch
import triton
import triton.language as tl

from keras_recurrent.backends.triton import _search
from keras_recurrent.backends.triton._linear_attention import (
    Blocks,
    read,
    real_tokens,
    segments_of,
    sums_of_segments,
)
from keras_recurrent.backends.triton._math import exp_of_decays, one_minus_exp
from keras_recurrent.backends.triton._products import operand, product, sums_of_columns

_GONE = tl.constexpr(-1e4)  # the logarithm of 0; sums of it stay finite
BLOCKS = {  # by `short`, the default first
    True: (
        Blocks(64, 128, 4, 3),
        Blocks(64, 128, 4, 2),
        Blocks(64, 64, 4, 3),
        Blocks(128, 64, 8, 3),
    ),
    False: (Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 2), Blocks(32, 64, 4, 2)),
}


@triton.jit
def applied(log_f, starts):
    """The logarithms of the decays that tokens really apply, all finite."""
    return tl.where(starts, _GONE, tl.maximum(log_f, _GONE))


@triton.jit
def _read_columns(tensor, row, real, d, D, H):
    """The transpose of `read`."""
    at = row[None, :] * (H * D) + d[:, None]
    return tl.load(tensor + at, real[None, :] & (d < D)[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "chunks", "each"])
def _walk_kernel(
    k,
    v,
    log_f,
    token_kind,
    first,
    states,
    last,
    totals,
    decays,
    T,
    H,
    K,
    V,
    chunks,
    each,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    PARTS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """k: keys, or queries if REVERSE; v: values, or gradients. Without states: totals, decays."""
    k_tiles = tl.cdiv(K, BLOCK_K)
    tiles = k_tiles * tl.cdiv(V, BLOCK_V)
    segments = tl.cdiv(chunks, each)
    walked = segments
    if states is None:
        walked = segments - 1
    tile = tl.program_id(0) % tiles
    segment = tl.program_id(0) // tiles % walked
    head = tl.program_id(0) // tiles // walked
    heads = tl.num_programs(0) // tiles // walked
    b = head // H
    d = tile % k_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    e = tile // k_tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    row = tl.arange(0, CHUNK)
    at = d[:, None] * V + e[None, :]
    inside = (d < K)[:, None] & (e < V)[None, :]

    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    decay = tl.full((BLOCK_K,), 1.0, tl.float32)
    if states is not None:
        if first is not None:
            of = head.to(tl.int64) * K * V
            state = tl.load(first + of + at, inside, other=0.0).to(tl.float32)
        if totals is not None:
            for s in range(segment):
                of = (s * heads + head).to(tl.int64) * K
                over = tl.load(decays + of + d, d < K, other=0.0)
                total = tl.load(totals + of * V + at, inside, other=0.0)
                state = over[:, None] * state + total

    for i in range(segment * each, tl.minimum((segment + 1) * each, chunks)):
        chunk = chunks - 1 - i if REVERSE else i
        token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
        real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
        if states is not None:
            slot = states + (head * chunks + chunk).to(tl.int64) * K * V
            tl.store(slot + at, operand(state, SHORT), inside)
        logarithm = _read_columns(log_f + token * K, row, real, d, K, H)
        if k is None:
            key = one_minus_exp(logarithm, not SHORT)
        else:
            key = _read_columns(k + token * K, row, real, d, K, H)
        logarithm = applied(logarithm, starts[None, :])
        if REVERSE:
            reach = row[:, None] <= row[None, :]
        else:
            reach = row[:, None] > row[None, :]
        key *= exp_of_decays(sums_of_columns(logarithm, reach, PARTS), not SHORT)
        over = exp_of_decays(tl.sum(logarithm, 1), not SHORT)
        decay *= over
        value = read(v + token * V, row, real, e, V, H)
        state = product(key, value, state * over[:, None], SHORT)

    if states is None:
        of = (segment * heads + head).to(tl.int64) * K
        tl.store(totals + of * V + at, state, inside)
        tl.store(decays + of + d, decay, d < K)
    elif segment == segments - 1:
        tl.store(last + head.to(tl.int64) * K * V + at, state, inside)


def walk(sizes, k, v, first, *, log_f, token_kind, parts, reverse=False):
    """Returns the states [B, H, chunks, K, V], as products take them, and the last one in float32.

    With `reverse`, k is q and v the gradient of the output, and these are gradients of states.
    """
    shape = (sizes.batch, sizes.heads, sizes.chunks, sizes.keys, sizes.values)
    states = v.new_empty(shape, dtype=torch.bfloat16 if sizes.short else torch.float32)
    last = v.new_empty(sizes.state_shape, dtype=torch.float32)

    def launch(blocks):
        options = blocks.options(sizes)
        programs = sizes.batch * sizes.heads * triton.cdiv(sizes.keys, options["BLOCK_K"])
        programs *= triton.cdiv(sizes.values, options["BLOCK_V"])
        segments, each = segments_of(programs, sizes.chunks)
        totals, decays = sums_of_segments(segments, last, sizes.state_shape[:3])

        def walk_through(segments, states, last):
            _walk_kernel[(programs * segments,)](
                k,
                v,
                log_f,
                token_kind,
                first,
                states,
                last,
                totals,
                decays,
                *sizes.numbers,
                sizes.chunks,
                each,
                CHUNK=sizes.chunk,
                SHORT=sizes.short,
                PARTS=parts,
                REVERSE=reverse,
                **options,
            )

        if segments > 1:
            walk_through(segments - 1, None, None)
        walk_through(segments, states, last)

    name = "gated_linear_attention states" + " backward" * reverse
    _search.run(name, BLOCKS[sizes.short], launch, (v, k, log_f, first, token_kind), sizes)
    return states, last
