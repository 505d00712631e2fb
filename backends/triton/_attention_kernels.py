"""The kernels of softmax attention, tile by tile; `_banded_attention` says what they take.

The softmax is taken as the keys come, relative to the largest logit so far. The backward makes the
weights again, from `log_total`, the logarithms of what they were divided by: once by queries, once
by keys, so that every sum has one place and one order.

Most tiles of keys are seen by all rows of the queries' tile: a first loop meets those, without a
mask, and a second one those on the edges of what is seen.
"""

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
from keras_recurrent.backends.triton._math import exp, exp_of_difference
from keras_recurrent.backends.triton._ring import kept_slots

_LOWEST = tl.constexpr(-1e30)  # of no logits; unlike -inf it can be taken from itself


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
            shrink = exp(peak - highest, FINE)
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


@triton.jit
def _of_ring(d_ring, s, b, g, wanted, position, end, C, G, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The gradients [keys, BLOCK_D] of those of the keys that are kept after the row."""
    d = tl.zeros((s.shape[0], BLOCK_D), tl.float32)
    if C > 0:
        slot, kept = kept_slots(s, b, position, end, C)
        ring = b.to(tl.int64) * C * G + g
        d = read(d_ring, ring, slot * G, kept & wanted, D, BLOCK_D, tl.float32)
    return d


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

    One of them may be None: the sums of both take more registers than there are where heads are
    wide, and the weights are made once more then.
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
    if d_keys is not None:
        value = read(v, at, key_row, s < S, V, BLOCK_V, TYPE)
        d_key = tl.zeros((KEYS, BLOCK_K), tl.float32)
    if d_values is not None:
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
            logits = product(key, tl.trans(query), tl.zeros((KEYS, ROWS), tl.float32), TYPE)
            if EDGE:
                low, high = sight_of(t, b, first_key, last_key, T, window)
                seen = (low[None, :] <= s[:, None]) & (s[:, None] <= high[None, :])
                logits = tl.where(seen, logits, float("-inf"))
            weights = exp_of_difference(logits, logarithm[None, :], FINE)
            if d_values is not None:
                d_value = product(weights, gradient, d_value, TYPE)
            if d_keys is not None:
                weighted = tl.load(slope + token + row, there, none)
                d_weights = product(value, tl.trans(gradient), tl.zeros_like(logits), TYPE)
                d_logits = weights * (d_weights - weighted[None, :])
                if EDGE:
                    d_logits = tl.where((low == high)[None, :], 0.0, d_logits)
                d_key = product(d_logits, query, d_key, TYPE)
    at += part.to(tl.int64) * (heads // parts) * S
    if d_keys is not None:
        d_key += _of_ring(d_key_ring, s, b, g, part == 0, position, end, C, G, K, BLOCK_K)
        write(d_keys, at, key_row, s < S, d_key, K, BLOCK_K)
    if d_values is not None:
        d_value += _of_ring(d_value_ring, s, b, g, part == 0, position, end, C, G, V, BLOCK_V)
        write(d_values, at, key_row, s < S, d_value, V, BLOCK_V)
