"""A token of softmax attention to a window of those before, from its linear maps.

De et al. 2024, arXiv:2402.19427. The slots of a ring are divided among programs, so that a single
row fills a GPU: the first kernel makes for each part of a ring a weighted sum of its values,
relative to the part's largest logit, and the second one puts the parts together. Products take
operands as `products.py` says, with the weights of values in two parts of bfloat16, so that 16 bits
are rounded in queries and keys alone.
"""

import triton
import triton.language as tl

from ._device.common import MULTIPROCESSORS
from ._device.math import exp
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._device.products import operand, product
from ._device.tokens import GOES_ON, PADDING, STARTS
from ._runtime.framework import forward_operation, pdl_options, run, step_unsupported_reason
from ._runtime.launch import Array, Launch, dtype_name, like

_LOWEST = tl.constexpr(-1e30)  # below any logit; finite, so that a difference of two is 0
_TILE = {"SLOTS": 32, "num_warps": 4, "num_stages": 2}
_TILE_OF_FLOAT32 = {"SLOTS": 16, "num_warps": 8, "num_stages": 1}
_MOST_CHANNELS = 256
_MOST_HEADS = 64  # of queries, that share a head of keys
_ALL = 2**31 - 1  # a window that everything is in


def unsupported(
    q, k, v, key, value, position, frequencies=None, token_kind=None, sliding_window=None
) -> str | None:
    """Reason why this implementation cannot take these arguments, or None."""
    if max(k.shape[2], v.shape[2]) > _MOST_CHANNELS:
        return f"takes heads of up to {_MOST_CHANNELS} channels, got {max(k.shape[2], v.shape[2])}"
    if q.shape[1] // k.shape[1] > _MOST_HEADS:
        share = q.shape[1] // k.shape[1]
        return f"takes up to {_MOST_HEADS} query heads per key head, got {share}"
    if key.shape[1] == 0:
        return "needs a state with room for at least one token, got a capacity of 0"
    dtypes = {dtype_name(t) for t in (q, k, v, key, value)}
    if len(dtypes) > 1:
        return f"takes tensors of one dtype, got {sorted(dtypes)}"
    return step_unsupported_reason(q, k, v, key, value, position, frequencies, token_kind)


def local_attention_step(
    q, k, v, key, value, position, frequencies=None, token_kind=None, sliding_window=None
):
    """q: [B, H, K]; k: [B, G, K]; v: [B, G, V]; key, value: [B, C, G, ...]; position: [B].

    Returns (o [B, H, V], the next key and value).
    """
    return _local_attention_step(
        *(q, k, v, key, value, position, frequencies, token_kind), sliding_window=sliding_window
    )


@triton.jit
def _load(tensor, offsets, valid):
    return tl.load(tensor + offsets, valid, other=0.0).to(tl.float32)


@triton.jit
def _rounded(x, SHORT: tl.constexpr):
    if SHORT:
        x = operand(x, True).to(tl.float32)
    return x


@triton.jit
def _rotated(x, rows, valid, c, place, frequencies, K: tl.constexpr, R: tl.constexpr):
    """Rows [N] of K channels c [BLOCK_K], of which channels j and j + R are turned together."""
    offsets = rows[:, None] * K + c[None, :]
    valid = valid[:, None] & (c < K)[None, :]
    found = _load(x, offsets, valid)
    if frequencies is not None:
        turned = c < 2 * R
        partner = tl.where(c < R, R, -R)
        other = _load(x, offsets + partner[None, :], valid & turned[None, :])
        angle = place.to(tl.float32) * _load(frequencies, c % R, turned)
        sine = tl.where(c < R, -tl.sin(angle), tl.sin(angle))
        found = found * tl.cos(angle)[None, :] + other * sine[None, :]
    return found


@triton.jit(do_not_specialize=["C", "window"])
def _parts_kernel(
    q,
    k,
    v,
    key,
    value,
    position,
    frequencies,
    token_kind,
    sums,
    peaks,
    totals,
    next_key,
    next_value,
    C,
    G,
    window,
    root,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    SHORT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_launch()
    part, group = tl.program_id(0) % PARTS, (tl.program_id(0) // PARTS).to(tl.int64)
    b, g = group // G, group % G
    kind = GOES_ON
    if token_kind is not None:
        kind = tl.load(token_kind + b)
    real = kind != PADDING
    place = tl.where(kind == STARTS, 0, tl.load(position + b)).to(tl.int32)

    h, c, e = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    heads = group * SHARE + h
    query = _rotated(q, heads, real & (h < SHARE), c, place, frequencies, K, R) * root
    query = _rounded(query, SHORT)
    one = group + tl.arange(0, 1)
    own_key = _rotated(k, one, real & (one >= 0), c, place, frequencies, K, R)
    own_key = _rounded(own_key, SHORT)
    own_value = _load(v, group * V + e, real & (e < V))

    # The first part holds the token itself.
    peak = tl.where(part == 0, tl.sum(query * own_key, 1), _LOWEST)
    total = tl.where((part == 0) & (h >= 0), 1.0, 0.0)
    weighted = tl.where((part == 0) & (h >= 0)[:, None], own_value[None, :], 0.0)
    for i in range(TILES):
        slot = (part * TILES + i) * SLOTS + tl.arange(0, SLOTS)
        age = (place - 1 - slot + C) % C
        visible = (slot < C) & (age < place) & (age < window - 1)
        rows = b * C * G + g + slot.to(tl.int64) * G
        in_key, in_value = visible[:, None] & (c < K)[None, :], visible[:, None] & (e < V)[None, :]
        keys = _load(key, rows[:, None] * K + c[None, :], in_key)
        logits = product(query, tl.trans(keys), tl.zeros((BLOCK_H, SLOTS), tl.float32), SHORT)
        logits = tl.where(visible[None, :], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        weights, shrink = exp(logits - new_peak[:, None], True), exp(peak - new_peak, True)
        weights = tl.where(visible[None, :], weights, 0.0)
        total = total * shrink + tl.sum(weights, 1)
        values = _load(value, rows[:, None] * V + e[None, :], in_value)
        weighted = product(weights, values, weighted * shrink[:, None], SHORT)
        if SHORT:
            weighted = product(weights - _rounded(weights, True), values, weighted, True)
        peak = new_peak
        if kind == STARTS:
            to = (slot < C)[:, None]
            tl.store(next_key + rows[:, None] * K + c[None, :], 0.0, to & (c < K)[None, :])
            tl.store(next_value + rows[:, None] * V + e[None, :], 0.0, to & (e < V)[None, :])
    to = heads * PARTS + part
    tl.store(peaks + to, peak, h < SHARE)
    tl.store(totals + to, total, h < SHARE)
    stored = (h < SHARE)[:, None] & (e < V)[None, :]
    tl.store(sums + to[:, None] * V + e[None, :], weighted, stored)

    # The token takes a slot, which this program has read to its end.
    tl.debug_barrier()
    slot = place % C
    writes = real & (slot // (TILES * SLOTS) == part)
    row = b * C * G + slot * G + g
    tl.store(next_key + row * K + c[None, :], own_key, writes & (c < K)[None, :])
    tl.store(next_value + row * V + e, own_value, writes & (e < V))


@triton.jit
def _whole_kernel(
    sums,
    peaks,
    totals,
    output,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_launch()
    head = tl.program_id(0).to(tl.int64)
    part, e = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    rows = head * PARTS + part
    peak = tl.load(peaks + rows, part < PARTS, other=_LOWEST)
    shrink = exp(peak - tl.max(peak, 0), True)
    total = tl.sum(shrink * _load(totals, rows, part < PARTS), 0)
    valid = (part < PARTS)[:, None] & (e < V)[None, :]
    weighted = _load(sums, rows[:, None] * V + e[None, :], valid) * shrink[:, None]
    tl.store(output + head * V + e, tl.sum(weighted, 0) / total, e < V)


def results(q, k, v, key, value, position, frequencies, token_kind, *, sliding_window: int | None):
    return Array((*q.shape[:2], v.shape[2]), dtype_name(q)), like(key), like(value)


def forward(q, k, v, key, value, position, frequencies, token_kind, *, sliding_window: int | None):
    batch, heads, keys = q.shape
    groups, values, capacity = v.shape[1], v.shape[2], key.shape[1]
    short = dtype_name(q) == "bfloat16"
    tile = _TILE if short else _TILE_OF_FLOAT32
    tiles_in_all = triton.cdiv(capacity, tile["SLOTS"])
    # Two programs for a multiprocessor, or one for each tile where these are fewer.
    parts = min(tiles_in_all, max(1, 2 * MULTIPROCESSORS // (batch * groups)))
    tiles = triton.cdiv(tiles_in_all, parts)
    parts = triton.cdiv(tiles_in_all, tiles)
    block_k, block_v = (max(16, triton.next_power_of_2(n)) for n in (keys, values))
    tensors = q, k, v, key, value, position, frequencies, token_kind
    options = {
        "SHARE": heads // groups,
        **{"K": keys, "V": values, "R": 0 if frequencies is None else frequencies.shape[0]},
        "BLOCK_H": max(16, triton.next_power_of_2(heads // groups)),
        **{"BLOCK_K": block_k, "BLOCK_V": block_v, "TILES": tiles, "PARTS": parts},
        **{"SHORT": short, **tile, **pdl_options(q)},
    }
    window = _ALL if sliding_window is None else min(sliding_window, _ALL)
    shape = batch, heads, parts
    of_parts = Array((*shape, values), "float32"), *[Array(shape, "float32")] * 2
    *of_parts, next_key, next_value = run(
        Launch(
            *(_parts_kernel, batch * groups * parts, tensors),
            (*of_parts, like(key), like(value)),
            (capacity, groups, window, keys**-0.5),
            options,
            updates=((3, 3), (4, 4)),
        )
    )
    options = {"V": values, "BLOCK_V": block_v, "PARTS": parts, **pdl_options(q)}
    options |= {"BLOCK_P": triton.next_power_of_2(parts)}
    output = Array((batch, heads, values), dtype_name(q))
    (output,) = run(Launch(_whole_kernel, batch * heads, tuple(of_parts), (output,), (), options))
    return output, next_key, next_value


_local_attention_step = forward_operation(
    "local_attention_step", forward, results, count=3, updates=("key", "value")
)
