"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2405.17381 (Lightning Attention), and 2023, arXiv:2307.14995
(TransNormerLLM): inside a chunk (Q K^T * M) V with M_us = decay^(u - s), across chunks Q S.
Padding does not tick the decay: M and its like are powers of it by the number of real tokens
between two places, and 0 where a document begins between them.

A program walks along the chunks of a head and keeps some columns of S in registers: no state goes
to memory. The gradients have the same form, of d_O, V, K and S^T for Q, and mirrored in time of
K, Q, d_O and G for V, and of V, d_O, Q and G^T for K: so there is one kernel for all of it. Where
heads are too few to fill the GPU, time is cut into segments: what each adds to the state is found
for all at once, and then each enters with what those before it added.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from keras_recurrent.backends.torch._common import register_gradient
from keras_recurrent.backends.triton import _search
from keras_recurrent.backends.triton._common import contiguous, on_device_of
from keras_recurrent.backends.triton._linear_attention import (
    Blocks,
    heads_of,
    read,
    real_tokens,
    refusal,
    segments_of,
    sums_of_segments,
)
from keras_recurrent.backends.triton._linear_attention_step import step
from keras_recurrent.backends.triton._math import exp_of_decays
from keras_recurrent.backends.triton._products import operand, product

# By `short`, and whether heads are wider than 128 channels, the default first. The state,
# [K, BLOCK_V], takes at most 64 of the registers of a thread. Float32 is multiplied in parts, which
# take many of them, too: wide heads of it leave no choice. Tiles of 128×32 were compiled wrongly
# for heads of 66 channels.
BLOCKS = {
    (True, False): (Blocks(128, 64, 4, 4), Blocks(128, 64, 4, 3), Blocks(128, 64, 4, 2)),
    (True, True): (
        Blocks(256, 32, 8, 4),
        Blocks(256, 32, 8, 3),
        Blocks(256, 32, 8, 2),
        Blocks(256, 16, 8, 4),
    ),
    (False, False): (Blocks(128, 32, 8), Blocks(128, 16, 8), Blocks(128, 64, 8)),
    (False, True): (Blocks(256, 32, 8),),
}


def unsupported(q, k, v, log_decay, initial_state=None, token_kind=None) -> str | None:
    """Why this kernel refuses these arguments; None if it accepts them."""
    return refusal(q, k, v, log_decay, initial_state, token_kind)


def lightning_attention(q, k, v, log_decay, initial_state=None, token_kind=None):
    """q, k: [B, T, H, K]; v: [B, T, H, V]; log_decay: [H], a constant, whose gradient is 0.

    Returns ([B, T, H, V] in v's dtype, [B, H, K, V] in float32).
    """
    return _forward(q, k, v, log_decay, initial_state, token_kind)


@triton.jit
def _power(ticks, log_decay, FINE: tl.constexpr):
    """decay to the power of ticks; not 0 * log_decay, which is not a number if the decay is 0."""
    return exp_of_decays(tl.where(ticks == 0, 0.0, ticks * log_decay), FINE)


@triton.jit
def _counts(real, starts, row, there, token_kind):
    """Up to and with each token, the real ones and those that start; and the whole of both.

    there: how many tokens of the chunk there are. Of the others, without kinds, nothing is asked:
    so the counts are those of every chunk, and stay where they are.
    """
    if token_kind is None:
        count, document, whole, latest = row + 1, row * 0, there, 0
    else:
        count, document = tl.cumsum(real.to(tl.int32), 0), tl.cumsum(starts.to(tl.int32), 0)
        whole, latest = tl.max(count, 0), tl.max(document, 0)
    return count, document, whole, latest


@triton.jit(do_not_specialize=["T", "chunks", "each"])
def _walk_kernel(
    q,
    k,
    v,
    log_decay,
    token_kind,
    first,
    output,
    last,
    totals,
    decays,
    T,
    H,
    K,
    V,
    state_k,
    state_v,
    chunks,
    each,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """What every token takes from tokens up to it, or, if REVERSE, from it on.

    state_k, state_v: the distances of elements of first and last along K and along V.
    Without an output: the totals and decays of all segments but the last.
    """
    tiles = tl.cdiv(V, BLOCK_V)
    segments = tl.cdiv(chunks, each)
    walked = segments
    if output is None:
        walked = segments - 1
    segment = tl.program_id(0) // tiles % walked
    head = tl.program_id(0) // tiles // walked
    heads = tl.num_programs(0) // tiles // walked
    b = head // H
    row = tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (d < K)[:, None] & (e < V)[None, :]
    at = d[:, None] * state_k + e[None, :] * state_v
    rate = tl.load(log_decay + head % H).to(tl.float32)

    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    decay = 1.0
    if output is not None:
        if first is not None:
            state = tl.load(first + head.to(tl.int64) * K * V + at, inside, other=0.0)
            state = state.to(tl.float32)
        if totals is not None:
            for s in range(segment):
                of = s * heads + head
                total = tl.load(totals + of.to(tl.int64) * K * V + at, inside, other=0.0)
                state = tl.load(decays + of) * state + total

    for i in range(segment * each, tl.minimum((segment + 1) * each, chunks)):
        chunk = chunks - 1 - i if REVERSE else i
        token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
        real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
        there = tl.minimum(T - chunk * CHUNK, CHUNK)
        count, document, whole, latest = _counts(real, starts, row, there, token_kind)
        from_begin = tl.where(document == 0, _power(count, rate, not SHORT), 0.0)
        rest = tl.maximum(whole - count, 0)
        to_end = tl.where(document == latest, _power(rest, rate, not SHORT), 0.0)
        key = operand(read(k + token * K, row, real, d, K, H), SHORT)
        value = operand(read(v + token * V, row, real, e, V, H), SHORT)
        if output is not None:
            query = operand(read(q + token * K, row, real, d, K, H), SHORT)
            weights = tl.zeros((CHUNK, CHUNK), tl.float32)
            weights = product(query, tl.trans(key), weights, SHORT)
            reached = document[:, None] == document[None, :]
            if REVERSE:
                reached &= row[:, None] <= row[None, :]
            else:
                reached &= row[:, None] >= row[None, :]
            ticks = tl.abs(count[:, None] - count[None, :])
            weights = tl.where(reached, weights * _power(ticks, rate, not SHORT), 0.0)
            recalled = tl.zeros((CHUNK, BLOCK_V), tl.float32)
            recalled = product(query, state, recalled, SHORT)
            recalled *= to_end[:, None] if REVERSE else from_begin[:, None]
            recalled = product(weights, value, recalled, SHORT)
            to = output + token * V + row[:, None] * (H * V) + e[None, :]
            tl.store(to, recalled, (row < there)[:, None] & (e < V)[None, :])
        left = from_begin if REVERSE else to_end
        over = tl.where(latest == 0, _power(whole, rate, not SHORT), 0.0)
        decay *= over
        value = value.to(tl.float32) * left[:, None]
        state = product(tl.trans(key), value, state * over, SHORT)

    if output is None:
        of = segment * heads + head
        tl.store(totals + of.to(tl.int64) * K * V + at, state, inside)
        tl.store(decays + of, decay)
    elif segment == segments - 1:
        tl.store(last + head.to(tl.int64) * K * V + at, state, inside)


def _walk(q, k, v, first, like, *, log_decay, token_kind, transposed=False, reverse=False):
    """The output in the dtype of `like`, and the last state.

    transposed: the states, in and out, are [B, H, V, K].
    """
    wide = q.shape[3] > 128
    # Float32 is multiplied in so many parts that only short chunks leave room for them.
    sizes = heads_of(q, k, v, chunk=32 if wide else 64, chunk_of_float32=16)
    batch, heads, keys, values = sizes.state_shape
    output = like.new_empty(v.shape)
    state_shape = (batch, heads, values, keys) if transposed else sizes.state_shape
    last = v.new_empty(state_shape, dtype=torch.float32)

    def launch(blocks):
        options = blocks.options(sizes)
        programs = batch * heads * triton.cdiv(values, options["BLOCK_V"])
        segments, each = segments_of(programs, sizes.chunks)
        totals, decays = sums_of_segments(segments, last, (batch, heads))

        def walk(segments, output):
            _walk_kernel[(programs * segments,)](
                q,
                k,
                v,
                log_decay,
                token_kind,
                first,
                output,
                last,
                totals,
                decays,
                *sizes.numbers,
                *((1, keys) if transposed else (values, 1)),
                sizes.chunks,
                each,
                CHUNK=sizes.chunk,
                SHORT=sizes.short,
                REVERSE=reverse,
                **options,
            )

        if segments > 1:
            walk(segments - 1, None)
        walk(segments, output)

    name = "lightning_attention" + " transposed" * transposed + " backward" * reverse
    tensors = q, k, v, log_decay, first, token_kind
    _search.run(name, BLOCKS[sizes.short, wide], launch, tensors, sizes)
    return output, last


@torch.library.custom_op("keras_recurrent::triton_lightning_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q, k, v, initial_state, log_decay, token_kind = contiguous(
        q, k, v, initial_state, log_decay, token_kind
    )
    decays = {"log_decay": log_decay, "token_kind": token_kind}
    with on_device_of(q):
        if q.shape[1] == 1:
            return step(heads_of(q, k, v), q, k, v, initial_state, **decays)
        return _walk(q, k, v, initial_state, v, **decays)


@_forward.register_fake
def _(q, k, v, log_decay, initial_state, token_kind):
    state_shape = heads_of(q, k, v).state_shape
    return v.new_empty(v.shape), v.new_empty(state_shape, dtype=torch.float32)


@torch.library.custom_op("keras_recurrent::triton_lightning_attention_backward", mutates_args=())
def _backward(
    d_output: Tensor,
    d_final_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, initial_state, log_decay, token_kind, d_output, d_final_state = contiguous(
        q, k, v, initial_state, log_decay, token_kind, d_output, d_final_state
    )
    decays = {"log_decay": log_decay, "token_kind": token_kind}
    mirrored = {**decays, "reverse": True}
    with on_device_of(q):
        d_q, _ = _walk(d_output, v, k, initial_state, q, **decays, transposed=True)
        d_v, d_initial = _walk(k, q, d_output, d_final_state, v, **mirrored)
        d_k, _ = _walk(v, d_output, q, d_final_state, k, **mirrored, transposed=True)
    return d_q, d_k, d_v, torch.zeros_like(log_decay), d_initial


@_backward.register_fake
def _(d_output, d_final_state, q, k, v, log_decay, initial_state, token_kind):
    given = (q, k, v, log_decay, d_final_state)
    return tuple(x.new_empty(x.shape) for x in given)


register_gradient(_forward, _backward, keep_output=False)
