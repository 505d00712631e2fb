"""Softmax attention of a row of queries to the keys before them, tile by tile.

q: [B, T, H, K]; k: [B, S, G, K]; v: [B, S, G, V]. Query t sees the keys from first_key[t] to
last_key[t], int32 [B, T], which rise along a row; where those are None, S is T, and it sees the
`window` keys up to its own. Padding, by `token_kind`, is queries of 0, whatever they hold.

The heads of queries that share a head of keys are rows of one matrix, token after token: a tile of
few tokens meets each key once for all of them. Tiles of keys that no row of it sees are not even
read, and those that all of its rows see, nearly all of them, are met without a mask.

The softmax is taken as the keys come, relative to the largest logit so far; what it was divided by
is kept for the backward. That goes over all weights twice, by queries and by keys, so that every
sum has one place and one order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from keras_recurrent.backends.triton._attention_tiles import (
    are_real,
    block_number,
    blocks,
    keys_of,
    product,
    read,
    rows_of,
    sight_of,
    write,
)
from keras_recurrent.backends.triton._math import exp_of_difference
from keras_recurrent.backends.triton._ring import kept_slots

_LOWEST = tl.constexpr(-1e30)  # of no logits; unlike -inf it can be taken from itself
_MANY_PROGRAMS = 256  # about two for each multiprocessor of a large GPU


class Sight(NamedTuple):
    """Which keys queries see: `window` of them, or those from `first_key` to `last_key`."""

    token_kind: torch.Tensor | None
    first_key: torch.Tensor | None
    last_key: torch.Tensor | None
    window: int

    def of_keys(self, length):
        """From which query on a key is seen, and before which no more; Nones if by the window."""
        if self.first_key is None or self.last_key is None:
            return None, None
        key = torch.arange(length, device=self.first_key.device, dtype=torch.int32)
        key = key.expand(self.first_key.shape[0], length).contiguous()
        return (
            torch.searchsorted(self.last_key, key, out_int32=True),
            torch.searchsorted(self.first_key, key, right=True, out_int32=True),
        )


@triton.jit
def _place(T, G, SHARE: tl.constexpr, ROWS: tl.constexpr):
    """Of this program: its first row, the row of the batch, the head of keys.

    Late rows, which see the most keys, go first.
    """
    tiles = tl.cdiv(T * SHARE, ROWS)
    heads = tl.num_programs(0) // tiles
    tile = tiles - 1 - tl.program_id(0) // heads
    return tile * ROWS, tl.program_id(0) % heads // G, tl.program_id(0) % G


@triton.jit
def _range_of(low, high, KEYS: tl.constexpr):
    """Where the keys that rows see begin, and blocks: before what all of them see, that, behind."""
    begin = tl.min(low, 0)
    before, inside, behind = blocks(
        begin, tl.max(low, 0), tl.min(high, 0) + 1, tl.max(high, 0) + 1, KEYS
    )
    return begin, before, inside, behind


@triton.jit(do_not_specialize=["T", "S", "window"])
def forward_kernel(
    q,
    k,
    v,
    token_kind,
    first_key,
    last_key,
    output,
    log_total,
    T,
    S,
    G,
    window,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TYPE: tl.constexpr,
):
    FINE: tl.constexpr = TYPE.is_fp32()
    begin, b, g = _place(T, G, SHARE, ROWS)
    token, row, t = rows_of(begin, b, g * SHARE, T, G * SHARE, SHARE, ROWS)
    low, high = sight_of(t, b, first_key, last_key, T, window)
    query = read(q, token, row, are_real(token_kind, t, b, T), K, BLOCK_K, TYPE)

    peak = tl.full((ROWS,), _LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, BLOCK_V), tl.float32)
    start, before, inside, behind = _range_of(low, high, KEYS)
    for EDGE in tl.static_range(2):
        for i in range(before + behind if EDGE else inside):
            at = start + block_number(i, before, inside, EDGE) * KEYS
            at, key_row, s = keys_of(at, b, g, S, G, KEYS)
            there = s < S if EDGE else None
            key = read(k, at, key_row, there, K, BLOCK_K, TYPE)
            logits = product(query, tl.trans(key), tl.zeros((ROWS, KEYS), tl.float32), TYPE)
            if EDGE:
                seen = (low[:, None] <= s[None, :]) & (s[None, :] <= high[:, None])
                logits = tl.where(seen, logits, float("-inf"))
            highest = tl.maximum(peak, tl.max(logits, 1))
            weights = exp_of_difference(logits, highest[:, None], FINE)
            shrink = exp_of_difference(peak, highest, FINE)
            total = total * shrink + tl.sum(weights, 1)
            value = read(v, at, key_row, there, V, BLOCK_V, TYPE)
            mean = product(weights, value, mean * shrink[:, None], TYPE)
            peak = highest
    total = tl.where(total == 0, 1.0, total)  # of a row that sees nothing
    write(output, token, row, t < T, mean / total[:, None], V, BLOCK_V)
    tl.store(log_total + token + row, peak + tl.log(total), t < T)


@triton.jit(do_not_specialize=["T", "S", "window"])
def queries_kernel(
    q,
    k,
    v,
    token_kind,
    first_key,
    last_key,
    output,
    log_total,
    d_output,
    d_q,
    slope,
    T,
    S,
    G,
    window,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """d_q, and for the other kernel `slope` [B, T, H], d_output times the output."""
    FINE: tl.constexpr = TYPE.is_fp32()
    begin, b, g = _place(T, G, SHARE, ROWS)
    token, row, t = rows_of(begin, b, g * SHARE, T, G * SHARE, SHARE, ROWS)
    low, high = sight_of(t, b, first_key, last_key, T, window)
    real = are_real(token_kind, t, b, T)
    query = read(q, token, row, real, K, BLOCK_K, TYPE)
    gradient = read(d_output, token, row, real, V, BLOCK_V, TYPE)
    mean = read(output, token, row, real, V, BLOCK_V, tl.float32)
    weighted = tl.sum(gradient.to(tl.float32) * mean, 1)
    tl.store(slope + token + row, weighted, t < T)
    logarithm = tl.load(log_total + token + row, t < T, other=0.0)

    d_query = tl.zeros((ROWS, BLOCK_K), tl.float32)
    start, before, inside, behind = _range_of(low, high, KEYS)
    for EDGE in tl.static_range(2):
        for i in range(before + behind if EDGE else inside):
            at = start + block_number(i, before, inside, EDGE) * KEYS
            at, key_row, s = keys_of(at, b, g, S, G, KEYS)
            there = s < S if EDGE else None
            key = read(k, at, key_row, there, K, BLOCK_K, TYPE)
            value = read(v, at, key_row, there, V, BLOCK_V, TYPE)
            logits = product(query, tl.trans(key), tl.zeros((ROWS, KEYS), tl.float32), TYPE)
            if EDGE:
                seen = (low[:, None] <= s[None, :]) & (s[None, :] <= high[:, None])
                logits = tl.where(seen, logits, float("-inf"))
            weights = exp_of_difference(logits, logarithm[:, None], FINE)
            d_weights = product(gradient, tl.trans(value), tl.zeros_like(logits), TYPE)
            d_logits = weights * (d_weights - weighted[:, None])
            if EDGE:
                d_logits = tl.where((low == high)[:, None], 0.0, d_logits)
            d_query = product(d_logits, key, d_query, TYPE)
    write(d_q, token, row, t < T, d_query, K, BLOCK_K)


@triton.jit(do_not_specialize=["T", "S", "window", "C"])
def keys_kernel(
    q,
    k,
    v,
    token_kind,
    first_key,
    last_key,
    seen_from,
    seen_to,
    log_total,
    d_output,
    slope,
    d_key_ring,
    d_value_ring,
    position,
    end,
    d_keys,
    d_values,
    T,
    S,
    G,
    window,
    C,
    parts,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """d_keys, d_values: [parts, B, S, G, ..], each of SHARE of the heads that share a key.

    d_key_ring, d_value_ring: [B, C, G, ..], those of what is kept after the row (`_ring.py`).
    """
    FINE: tl.constexpr = TYPE.is_fp32()
    # Early keys, which most queries see, go first.
    tiles = tl.cdiv(S, KEYS)
    heads = tl.num_programs(0) // tiles
    part = tl.program_id(0) % parts
    b, g = tl.program_id(0) % heads // parts // G, tl.program_id(0) // parts % G
    begin = tl.program_id(0) // heads * KEYS
    latest = tl.minimum(begin + KEYS, S) - 1
    if seen_from is None:
        start, whole = begin, latest
        whole_end, stop = tl.minimum(begin + window, T), tl.minimum(latest + window, T)
    else:
        row_of_batch = b.to(tl.int64) * S
        start = tl.load(seen_from + row_of_batch + begin)
        whole = tl.load(seen_from + row_of_batch + latest)
        whole_end = tl.load(seen_to + row_of_batch + begin)
        stop = tl.load(seen_to + row_of_batch + latest)
    start *= SHARE
    before, inside, behind = blocks(start, whole * SHARE, whole_end * SHARE, stop * SHARE, ROWS)

    at, key_row, s = keys_of(begin, b, g, S, G, KEYS)
    key = read(k, at, key_row, s < S, K, BLOCK_K, TYPE)
    value = read(v, at, key_row, s < S, V, BLOCK_V, TYPE)
    d_key = tl.zeros((KEYS, BLOCK_K), tl.float32)
    d_value = tl.zeros((KEYS, BLOCK_V), tl.float32)
    head = (g * parts + part) * SHARE
    for EDGE in tl.static_range(2):
        for i in range(before + behind if EDGE else inside):
            row = start + block_number(i, before, inside, EDGE) * ROWS
            token, row, t = rows_of(row, b, head, T, G * parts * SHARE, SHARE, ROWS)
            there = t < T if EDGE else None
            real = are_real(token_kind, t, b, T) if EDGE or token_kind is not None else None
            query = read(q, token, row, real, K, BLOCK_K, TYPE)
            gradient = read(d_output, token, row, real, V, BLOCK_V, TYPE)
            none = 0.0 if EDGE else None
            logarithm = tl.load(log_total + token + row, there, none)
            weighted = tl.load(slope + token + row, there, none)
            logits = product(key, tl.trans(query), tl.zeros((KEYS, ROWS), tl.float32), TYPE)
            if EDGE:
                low, high = sight_of(t, b, first_key, last_key, T, window)
                seen = (low[None, :] <= s[:, None]) & (s[:, None] <= high[None, :])
                logits = tl.where(seen, logits, float("-inf"))
            weights = exp_of_difference(logits, logarithm[None, :], FINE)
            d_value = product(weights, gradient, d_value, TYPE)
            d_weights = product(value, tl.trans(gradient), tl.zeros_like(logits), TYPE)
            d_logits = weights * (d_weights - weighted[None, :])
            if EDGE:
                d_logits = tl.where((low == high)[None, :], 0.0, d_logits)
            d_key = product(d_logits, query, d_key, TYPE)
    if C > 0:
        slot, kept = kept_slots(s, b, position, end, C)
        kept &= part == 0
        ring = b.to(tl.int64) * C * G + g
        d_key += read(d_key_ring, ring, slot * G, kept, K, BLOCK_K, tl.float32)
        d_value += read(d_value_ring, ring, slot * G, kept, V, BLOCK_V, tl.float32)
    at += part.to(tl.int64) * (heads // parts) * S
    write(d_keys, at, key_row, s < S, d_key, K, BLOCK_K)
    write(d_values, at, key_row, s < S, d_value, V, BLOCK_V)


class Tiles(NamedTuple):
    """ROWS of queries meet KEYS."""

    ROWS: int
    KEYS: int
    num_warps: int
    num_stages: int


# As much as fits into the registers and the shared memory of a multiprocessor of Hopper: for 16
# bits and for float32, heads of up to 128 channels and wider ones.
_TILES = {
    forward_kernel: {
        16: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2)),
        32: (Tiles(32, 32, 8, 1), Tiles(16, 32, 4, 1)),
    },
    queries_kernel: {
        16: (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
        32: (Tiles(32, 32, 8, 1), Tiles(16, 32, 4, 1)),
    },
    keys_kernel: {
        16: (Tiles(64, 128, 8, 2), Tiles(64, 64, 8, 2)),
        32: (Tiles(32, 32, 8, 1), Tiles(32, 16, 8, 1)),
    },
}


def constants(kernel, share, keys, values, dtype):
    """Sizes and options of a kernel, for `share` heads of queries in a tile."""
    block_k, block_v = (max(16, triton.next_power_of_2(n)) for n in (keys, values))
    chosen = _TILES[kernel][dtype.primitive_bitwidth][max(block_k, block_v) > 128]
    return {
        "SHARE": share,
        "K": keys,
        "V": values,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "TYPE": dtype,
        **chosen._asdict(),
    }


def _dtype(*tensors):
    """In which products are taken: that of the tensors if they share one of 16 bits."""
    dtypes = {x.dtype for x in tensors}
    if dtypes == {torch.bfloat16}:
        return tl.bfloat16
    return tl.float16 if dtypes == {torch.float16} else tl.float32


def forward(q, k, v, sight):
    """Returns [B, T, H, V] in q's dtype and the logarithms of the softmax's sums, [B, T, H]."""
    output = q.new_empty(*q.shape[:3], v.shape[3])
    log_total = q.new_empty(q.shape[:3], dtype=torch.float32)
    _by_queries(forward_kernel, q, k, v, sight, output, log_total)
    return output, log_total


def backward(d_output, d_rings, output, log_total, q, k, v, sight, position, end):
    """Returns the gradients of q, k and v, the last two perhaps in float32.

    d_rings: those of the keys and values [B, C, G, ...] that are kept; position, end: see `_ring`.
    """
    d_q, slope = torch.empty_like(q), torch.empty_like(log_total)
    _by_queries(queries_kernel, q, k, v, sight, output, log_total, d_output, d_q, slope)

    length, heads = q.shape[1:3]
    batch, places, groups, _ = k.shape
    options = constants(keys_kernel, heads // groups, q.shape[3], v.shape[3], _dtype(q, k, v))
    programs = batch * groups * triton.cdiv(places, options["KEYS"])
    parts = _parts(heads // groups, programs)
    options["SHARE"] //= parts
    d_keys, d_values = (
        x.new_empty(parts, *x.shape, dtype=torch.float32 if parts > 1 else x.dtype) for x in (k, v)
    )
    keys_kernel[(programs * parts,)](
        q,
        k,
        v,
        *sight[:3],
        *sight.of_keys(places),
        log_total,
        d_output,
        slope,
        *d_rings,
        position,
        end,
        d_keys,
        d_values,
        length,
        places,
        groups,
        sight.window,
        d_rings[0].shape[1],
        parts,
        **options,
    )
    return d_q, *(d.sum(0) if parts > 1 else d[0] for d in (d_keys, d_values))


def _by_queries(kernel, q, k, v, sight, *tensors):
    batch, length, heads, _ = q.shape
    places, groups = k.shape[1:3]
    share = heads // groups
    options = constants(kernel, share, q.shape[3], v.shape[3], _dtype(q, k, v))
    grid = (batch * groups * triton.cdiv(length * share, options["ROWS"]),)
    numbers = length, places, groups, sight.window
    kernel[grid](q, k, v, *sight[:3], *tensors, *numbers, **options)


def _parts(share, programs):
    """Into how many parts `share` heads go that share keys, where programs are too few."""
    enough = (n for n in range(1, share) if share % n == 0 and n * programs >= _MANY_PROGRAMS)
    return next(enough, share)
