"""One decoding step of sliding window attention, from the projections of the token.

De et al. 2024, arXiv:2402.19427. The slots of the circular KV buffer are divided among programs, so
that a single sequence fills a GPU. Programs take tiles of slots in turn, so that they share the few
slots that are filled in a large buffer. The first kernel computes a weighted sum of the values of
each part of the buffer, relative to the part's largest logit; the second kernel combines the parts
and applies the gate. A buffer of few slots, or of many sequences, is a single part and needs no
second kernel. Products take operands as in `_device/products.py`. The attention weights are
split into two bfloat16 parts, so that only queries and keys are rounded to 16 bits.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from ._decoding.heads import load_heads
from ._device.common import MULTIPROCESSORS, Constants, load_float32
from ._device.math import exp, sigmoid
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._device.products import operand, product
from ._device.tokens import CONTINUES, PADDING, STARTS
from ._runtime.framework import decoding_step, pdl_options, run, step_unsupported_reason
from ._runtime.launch import Array, Launch, cdiv, dtype_name, like, next_power_of_2

_LOWEST = tl.constexpr(-1e30)  # below any logit; finite, so that a difference of two is 0
_TILE = {"SLOTS": 32, "num_warps": 4, "num_stages": 2}
_FLOAT32_TILE = {"SLOTS": 16, "num_warps": 8, "num_stages": 1}
_UNDIVIDED_TILES = 2  # so many tiles of slots take less time than a second kernel
_MAX_CHANNELS = 256
_MAX_HEADS = 64  # query heads that share a key head
_NO_WINDOW = 2**31 - 1  # a window without a limit


def unsupported(q, k, v, key, value, **others) -> str | None:
    if max(k.shape[2], v.shape[2]) > _MAX_CHANNELS:
        return f"takes heads of up to {_MAX_CHANNELS} channels, got {max(k.shape[2], v.shape[2])}"
    if q.shape[1] // k.shape[1] > _MAX_HEADS:
        share = q.shape[1] // k.shape[1]
        return f"takes up to {_MAX_HEADS} query heads per key head, got {share}"
    if key.shape[1] == 0:
        return "needs a state with room for at least one token, got a capacity of 0"
    dtypes = {dtype_name(t) for t in (q, k, v, key, value)}
    if len(dtypes) > 1:
        return f"takes tensors of one dtype, got {sorted(dtypes)}"
    return step_unsupported_reason(q, k, v, key, value, **others)


@triton.jit
def _round_operand(x, SHORT: tl.constexpr):
    if SHORT:
        x = operand(x, True).to(tl.float32)
    return x


class AttentionHeads(NamedTuple):
    """The constants of a program of `_partial_kernel`."""

    SHARE: int  # query heads that share a key head
    K: int
    V: int
    R: int  # pairs of channels that are rotated, or 0
    EPSILON: float
    LOGIT_SCALING: float  # 0: logits are not scaled
    LOG_SCALING: float
    BLOCK_H: int
    BLOCK_K: int
    BLOCK_V: int
    SLOTS: int
    PARTS: int
    SHORT: bool


@triton.jit
def _attend_to_slots(
    query,
    peak,
    total,
    weighted,
    key,
    value,
    b,
    g,
    part,
    token_position,
    C,
    G,
    window,
    HEADS: tl.constexpr,
):
    """Adds the filled slots of a part to an online softmax: its peak, total and weighted sum."""
    SHORT: tl.constexpr = HEADS.SHORT
    K: tl.constexpr = HEADS.K
    V: tl.constexpr = HEADS.V
    c, e = tl.arange(0, HEADS.BLOCK_K), tl.arange(0, HEADS.BLOCK_V)
    filled_tiles = tl.cdiv(tl.minimum(token_position, C), HEADS.SLOTS)
    for i in range(part, filled_tiles, HEADS.PARTS):
        slot = i * HEADS.SLOTS + tl.arange(0, HEADS.SLOTS)
        age = (token_position - 1 - slot + C) % C
        visible = (slot < C) & (age < token_position) & (age < window - 1)
        rows = b * C * G + g + slot.to(tl.int64) * G
        in_key, in_value = visible[:, None] & (c < K)[None, :], visible[:, None] & (e < V)[None, :]
        keys = load_float32(key, rows[:, None] * K + c[None, :], in_key)
        logits = tl.zeros((HEADS.BLOCK_H, HEADS.SLOTS), tl.float32)
        logits = product(query, tl.trans(keys), logits, SHORT)
        logits = tl.where(visible[None, :], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        weights, shrink = exp(logits - new_peak[:, None], True), exp(peak - new_peak, True)
        weights = tl.where(visible[None, :], weights, 0.0)
        total = total * shrink + tl.sum(weights, 1)
        values = load_float32(value, rows[:, None] * V + e[None, :], in_value)
        weighted = product(weights, values, weighted * shrink[:, None], SHORT)
        if SHORT:
            weighted = product(weights - _round_operand(weights, True), values, weighted, True)
        peak = new_peak
    return peak, total, weighted


@triton.jit
def _clear_slots(next_key, next_value, b, g, part, tiles, C, G, HEADS: tl.constexpr):
    """Stores zeros in all slots of a part, filled or not."""
    c, e = tl.arange(0, HEADS.BLOCK_K), tl.arange(0, HEADS.BLOCK_V)
    for i in range(part, tiles, HEADS.PARTS):
        slot = i * HEADS.SLOTS + tl.arange(0, HEADS.SLOTS)
        rows, valid = (b * C * G + g + slot.to(tl.int64) * G)[:, None], (slot < C)[:, None]
        in_key, in_value = valid & (c < HEADS.K)[None, :], valid & (e < HEADS.V)[None, :]
        tl.store(next_key + rows * HEADS.K + c[None, :], 0.0, in_key)
        tl.store(next_value + rows * HEADS.V + e[None, :], 0.0, in_value)


@triton.jit(do_not_specialize=["C", "window", "tiles"])
def _partial_kernel(
    q,
    k,
    v,
    key,
    value,
    position,
    frequencies,
    q_scale,
    k_scale,
    output_gate,
    token_kind,
    partial,
    output,
    next_key,
    next_value,
    C,
    G,
    window,
    tiles,
    query_scale,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Stores the output if there is a single part, else `partial`: sums, peaks and totals."""
    launch_dependents(PDL)
    wait_for_previous_launch(PDL)
    SHARE: tl.constexpr = HEADS.SHARE
    PARTS: tl.constexpr = HEADS.PARTS
    K: tl.constexpr = HEADS.K
    V: tl.constexpr = HEADS.V
    part, group = tl.program_id(0) % PARTS, (tl.program_id(0) // PARTS).to(tl.int64)
    b, g = group // G, group % G
    kind = CONTINUES
    if token_kind is not None:
        kind = tl.load(token_kind + b)
    real = kind != PADDING
    token_position = tl.where(kind == STARTS, 0, tl.load(position + b)).to(tl.int32)

    h, c = tl.arange(0, HEADS.BLOCK_H), tl.arange(0, HEADS.BLOCK_K)
    e = tl.arange(0, HEADS.BLOCK_V)
    heads = group * SHARE + h
    query = load_heads(
        *(q, heads, real & (h < SHARE), c, token_position, frequencies, q_scale, HEADS)
    )
    if HEADS.LOGIT_SCALING > 0:
        query_scale *= tl.log(token_position + HEADS.LOGIT_SCALING) / HEADS.LOG_SCALING
    query *= query_scale
    query = _round_operand(query, HEADS.SHORT)
    group_row = group + tl.arange(0, 1)
    token_key = load_heads(
        *(k, group_row, real & (group_row >= 0), c, token_position, frequencies, k_scale, HEADS)
    )
    token_key = _round_operand(token_key, HEADS.SHORT)
    token_value = load_float32(v, group * V + e, real & (e < V))

    in_output = heads[:, None] * V + e[None, :]
    stored = (h < SHARE)[:, None] & (e < V)[None, :]
    if PARTS == 1 and output_gate is not None:
        gate = sigmoid(load_float32(output_gate, in_output, stored), True)[0]

    # The first part includes the token itself.
    peak = tl.where(part == 0, tl.sum(query * token_key, 1), _LOWEST)
    total = tl.where((part == 0) & (h >= 0), 1.0, 0.0)
    weighted = tl.where((part == 0) & (h >= 0)[:, None], token_value[None, :], 0.0)
    peak, total, weighted = _attend_to_slots(
        *(query, peak, total, weighted, key, value, b, g, part, token_position),
        *(C, G, window, HEADS),
    )
    if kind == STARTS:  # no slot is filled
        _clear_slots(next_key, next_value, b, g, part, tiles, C, G, HEADS)
    if PARTS == 1:
        weighted /= total[:, None]
        if output_gate is not None:
            weighted *= gate
        tl.store(output + in_output, weighted, stored)
    else:
        sums, peaks, totals = partial
        target = heads * PARTS + part
        tl.store(peaks + target, peak, h < SHARE)
        tl.store(totals + target, total, h < SHARE)
        tl.store(sums + target[:, None] * V + e[None, :], weighted, stored)

    # The token is stored in a slot that this program has finished reading.
    tl.debug_barrier()
    slot = token_position % C
    stores_token = real & (slot // HEADS.SLOTS % PARTS == part)
    row = b * C * G + slot * G + g
    tl.store(next_key + row * K + c[None, :], token_key, stores_token & (c < K)[None, :])
    tl.store(next_value + row * V + e, token_value, stores_token & (e < V))


@triton.jit
def _combine_kernel(
    sums,
    peaks,
    totals,
    output_gate,
    output,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait_for_previous_launch(PDL)
    head = tl.program_id(0).to(tl.int64)
    part, e = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    rows = head * PARTS + part
    peak = tl.load(peaks + rows, part < PARTS, other=_LOWEST)
    shrink = exp(peak - tl.max(peak, 0), True)
    total = tl.sum(shrink * load_float32(totals, rows, part < PARTS), 0)
    valid = (part < PARTS)[:, None] & (e < V)[None, :]
    weighted = load_float32(sums, rows[:, None] * V + e[None, :], valid) * shrink[:, None]
    result = tl.sum(weighted, 0) / total
    if output_gate is not None:
        result *= sigmoid(load_float32(output_gate, head * V + e, e < V), True)[0]
    tl.store(output + head * V + e, result, e < V)


def results(q, k, v, key, value, *_, **_options):
    return Array((*q.shape[:2], v.shape[2]), dtype_name(q)), like(key), like(value)


@decoding_step(unsupported, results, count=3, updates=("key", "value"))
def local_attention_step(
    q,
    k,
    v,
    key,
    value,
    position,
    frequencies=None,
    q_scale=None,
    k_scale=None,
    output_gate=None,
    token_kind=None,
    sliding_window: int | None = None,
    epsilon: float | None = None,
    query_scale: float | None = None,
    logit_scaling: float | None = None,
):
    batch, heads, keys = q.shape
    groups, values, capacity = v.shape[1], v.shape[2], key.shape[1]
    short = dtype_name(q) == "bfloat16"
    tile = _TILE if short else _FLOAT32_TILE
    num_tiles = cdiv(capacity, tile["SLOTS"])
    # Two programs per multiprocessor, or one per tile if there are fewer tiles.
    parts = min(num_tiles, max(1, 2 * MULTIPROCESSORS // (batch * groups)))
    parts = 1 if num_tiles <= _UNDIVIDED_TILES else parts
    block_k, block_v = (max(16, next_power_of_2(n)) for n in (keys, values))
    constants = AttentionHeads(
        SHARE=heads // groups,
        K=keys,
        V=values,
        R=0 if frequencies is None else frequencies.shape[0],
        EPSILON=epsilon or 0.0,
        LOGIT_SCALING=logit_scaling or 0.0,
        LOG_SCALING=math.log(math.floor(logit_scaling)) if logit_scaling else 1.0,
        BLOCK_H=max(16, next_power_of_2(heads // groups)),
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        SLOTS=tile["SLOTS"],
        PARTS=parts,
        SHORT=short,
    )
    options = {"HEADS": Constants(constants), **tile, **pdl_options(q)}
    del options["SLOTS"]
    window = _NO_WINDOW if sliding_window is None else min(sliding_window, _NO_WINDOW)
    output, *buffers = results(q, k, v, key, value)
    partial, shape = None, (batch, heads, parts)
    if parts > 1:
        partial = Array((*shape, values), "float32"), *[Array(shape, "float32")] * 2
    inputs = q, k, v, key, value, position, frequencies, q_scale, k_scale, output_gate, token_kind
    outputs = partial, output if parts == 1 else None, *buffers
    query_scale = keys**-0.5 if query_scale is None else query_scale
    numbers, updates = (capacity, groups, window, num_tiles, query_scale), ((3, 2), (4, 3))
    programs = batch * groups * parts
    partial, result, next_key, next_value = run(
        Launch(_partial_kernel, programs, inputs, outputs, numbers, options, updates)
    )
    if parts == 1:
        return result, next_key, next_value
    options = {"V": values, "BLOCK_V": block_v, "PARTS": parts, **pdl_options(q)}
    options |= {"BLOCK_P": next_power_of_2(parts)}
    inputs = *partial, output_gate
    (output,) = run(Launch(_combine_kernel, batch * heads, inputs, (output,), (), options))
    return output, next_key, next_value
