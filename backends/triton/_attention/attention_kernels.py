"""Kernels of softmax attention; `banded_attention.py` documents their tensors and runs them.

The forward computes an online softmax, relative to the largest logit so far. The backward computes
the weights again, once for each query and once for each key, so that every sum has one program and
a fixed order. Weights are exp(logit - origin) / total: `origin` is a query's largest logit, and
`total` the sum of exp(logit - origin). With 16-bit products there is no total, and `origin` is the
logarithm of the sum of exp(logit): the weights then have as many digits as that number has after
the decimal point, which is enough.

The gradient of a logit is the difference of two numbers, of which the second is `delta`, the sum of
d_output * output. Where a query attends almost only to one key, the two are almost equal, and with
a 16-bit output their difference would be only its rounding error. The forward therefore saves the
next 8 bits of a 16-bit output in `rest`. With 32 bits the two numbers are rounded independently.
The sum of weights * d_weights would have the same rounding errors as d_weights, which would almost
cancel, but it is known only after the loop over all keys: where keys are far larger than one, the
error of d_q is about three times that of such a sum.

Most tiles of keys are visible to all rows of a tile of queries. A first loop processes these tiles
without a mask, a second one the tiles at the edges of the visible range.
"""

import triton
import triton.language as tl

from .._device.math import exp, exp_of_difference
from .attention_tiles import (
    add_rest,
    block_number,
    cast,
    count_blocks,
    key_rows,
    load_rows,
    product,
    query_rows,
    real_queries,
    rounding_rest,
    store_rows,
    visible_keys,
)
from .circular_buffer import buffer_slots

_LOWEST = tl.constexpr(-1e30)  # below any logit; finite, so that a difference of two is 0


@triton.jit
def _locate_program(T, G, TILE: tl.constexpr):
    """This program's sequence in the batch, its key head, and the `query_rows` of its tile.

    Tiles with the most visible keys come first, for load balance.
    """
    tiles = tl.cdiv(T * TILE.SHARE, TILE.ROWS)
    heads = tl.num_programs(0) // tiles
    begin = (tiles - 1 - tl.program_id(0) // heads) * TILE.ROWS
    b, g = tl.program_id(0) % heads // G, tl.program_id(0) % G
    return b, g, query_rows(begin, b, g * TILE.SHARE, T, G * TILE.SHARE, TILE)


@triton.jit
def _key_blocks(low, high, KEYS: tl.constexpr):
    """The first key visible to any row, and `count_blocks` around the range visible to all rows."""
    begin = tl.min(low, 0)
    num_before, num_inside, num_after = count_blocks(
        begin, tl.max(low, 0), tl.min(high, 0) + 1, tl.max(high, 0) + 1, KEYS
    )
    return begin, num_before, num_inside, num_after


@triton.jit
def _query_blocks(queries, begin, latest, b, T, S, window, TILE: tl.constexpr):
    """The first row that sees any of these keys, and `count_blocks` around rows that see all."""
    first_query, query_end = queries[0], queries[1]
    if first_query is None:
        start, inner_begin = begin, latest
        inner_end, stop = tl.minimum(begin + window, T), tl.minimum(latest + window, T)
    else:
        row_of_batch = b.to(tl.int64) * S
        start = tl.load(first_query + row_of_batch + begin)
        inner_begin = tl.load(first_query + row_of_batch + latest)
        inner_end = tl.load(query_end + row_of_batch + begin)
        stop = tl.load(query_end + row_of_batch + latest)
    start *= TILE.SHARE
    num_before, num_inside, num_after = count_blocks(
        *(start, inner_begin * TILE.SHARE, inner_end * TILE.SHARE, stop * TILE.SHARE, TILE.ROWS)
    )
    return start, num_before, num_inside, num_after


@triton.jit
def _logits(query, key, low, high, s, EDGE: tl.constexpr, TYPE: tl.constexpr):
    """Products of queries and keys s; with EDGE, -inf for keys that a query does not see."""
    logits = tl.zeros((query.shape[0], key.shape[0]), tl.float32)
    logits = product(query, tl.trans(key), logits, TYPE)
    if EDGE:
        is_visible = (low[:, None] <= s[None, :]) & (s[None, :] <= high[:, None])
        logits = tl.where(is_visible, logits, float("-inf"))
    return logits


@triton.jit(do_not_specialize=["T", "S", "window"])
def forward_kernel(
    q,
    k,
    v,
    visible,
    output,
    rest,
    origin,
    total,
    T,
    S,
    G,
    window,
    TILE: tl.constexpr,
):
    FINE: tl.constexpr = TILE.TYPE.is_fp32()
    b, g, rows = _locate_program(T, G, TILE)
    base, row, t = rows
    low, high = visible_keys(visible, t, b, T, window)
    query = load_rows(q, base, row, real_queries(visible, t, b, T), TILE.K, TILE.BLOCK_K, TILE.TYPE)

    peak = tl.full((TILE.ROWS,), _LOWEST, tl.float32)
    row_total = tl.zeros((TILE.ROWS,), tl.float32)
    weighted_sum = tl.zeros((TILE.ROWS, TILE.BLOCK_V), tl.float32)
    start, num_before, num_inside, num_after = _key_blocks(low, high, TILE.KEYS)
    for EDGE in tl.static_range(2):
        for i in range(num_before + num_after if EDGE else num_inside):
            first = start + block_number(i, num_before, num_inside, EDGE) * TILE.KEYS
            key_base, key_row, s = key_rows(first, b, g, S, G, TILE.KEYS)
            valid = s < S if EDGE else None
            key = load_rows(k, key_base, key_row, valid, TILE.K, TILE.BLOCK_K, TILE.TYPE)
            logits = _logits(query, key, low, high, s, EDGE, TILE.TYPE)
            new_peak = tl.maximum(peak, tl.max(logits, 1))
            weights = exp_of_difference(logits, new_peak[:, None], FINE)
            shrink = exp(peak - new_peak, FINE)
            row_total = row_total * shrink + tl.sum(weights, 1)
            value = load_rows(v, key_base, key_row, valid, TILE.V, TILE.BLOCK_V, TILE.TYPE)
            weighted_sum = product(weights, value, weighted_sum * shrink[:, None], TILE.TYPE)
            peak = new_peak
    row_total = tl.where(row_total == 0, 1.0, row_total)  # rows that see no key
    result = weighted_sum / row_total[:, None]
    rounded = cast(result, output.dtype.element_ty)
    if rest is not None:  # before a store, which would keep the result in registers
        bits = rounding_rest(result, rounded, output.dtype.element_ty)
        store_rows(rest, base, row, t < T, bits, TILE.V, TILE.BLOCK_V)
    store_rows(output, base, row, t < T, rounded, TILE.V, TILE.BLOCK_V)
    if total is None:
        peak += tl.log(row_total)
    else:
        tl.store(total + base + row, row_total, t < T)
    tl.store(origin + base + row, peak, t < T)


@triton.jit(do_not_specialize=["T", "S", "window"])
def queries_kernel(
    q,
    k,
    v,
    visible,
    output,
    rest,
    origin,
    total,
    d_output,
    d_q,
    delta,
    T,
    S,
    G,
    window,
    TILE: tl.constexpr,
):
    """Stores d_q and, for `keys_kernel`, delta [B, T, H], the sum of d_output * output."""
    FINE: tl.constexpr = TILE.TYPE.is_fp32()
    b, g, rows = _locate_program(T, G, TILE)
    base, row, t = rows
    low, high = visible_keys(visible, t, b, T, window)
    real = real_queries(visible, t, b, T)
    query = load_rows(q, base, row, real, TILE.K, TILE.BLOCK_K, TILE.TYPE)
    gradient = load_rows(d_output, base, row, real, TILE.V, TILE.BLOCK_V, TILE.TYPE)
    result = load_rows(output, base, row, real, TILE.V, TILE.BLOCK_V, tl.float32)
    if rest is not None:
        bits = load_rows(rest, base, row, real, TILE.V, TILE.BLOCK_V, tl.int32)
        result = add_rest(result, bits, output.dtype.element_ty)
    row_delta = tl.sum(gradient.to(tl.float32) * result, 1)
    tl.store(delta + base + row, row_delta, t < T)
    row_origin = tl.load(origin + base + row, t < T, other=0.0)

    d_query = tl.zeros((TILE.ROWS, TILE.BLOCK_K), tl.float32)
    start, num_before, num_inside, num_after = _key_blocks(low, high, TILE.KEYS)
    for EDGE in tl.static_range(2):
        for i in range(num_before + num_after if EDGE else num_inside):
            first = start + block_number(i, num_before, num_inside, EDGE) * TILE.KEYS
            key_base, key_row, s = key_rows(first, b, g, S, G, TILE.KEYS)
            valid = s < S if EDGE else None
            key = load_rows(k, key_base, key_row, valid, TILE.K, TILE.BLOCK_K, TILE.TYPE)
            value = load_rows(v, key_base, key_row, valid, TILE.V, TILE.BLOCK_V, TILE.TYPE)
            logits = _logits(query, key, low, high, s, EDGE, TILE.TYPE)
            weights = exp_of_difference(logits, row_origin[:, None], FINE)
            d_weights = product(gradient, tl.trans(value), tl.zeros_like(logits), TILE.TYPE)
            d_logits = weights * (d_weights - row_delta[:, None])
            if EDGE:  # a softmax over one key is constant: exactly 0, not rounding errors
                d_logits = tl.where((low == high)[:, None], 0.0, d_logits)
            d_query = product(d_logits, key, d_query, TILE.TYPE)
    if total is not None:
        d_query /= tl.load(total + base + row, t < T, other=1.0)[:, None]
    store_rows(d_q, base, row, t < T, d_query, TILE.K, TILE.BLOCK_K)


@triton.jit
def _buffer_gradient(
    d_buffers, i: tl.constexpr, s, b, g, part, C, G, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Gradients [keys, BLOCK_D] of keys (or values) at s from the circular buffer's gradients."""
    d = tl.zeros((s.shape[0], BLOCK_D), tl.float32)
    if C > 0:
        slot, in_buffer = buffer_slots(s, b, d_buffers[2], d_buffers[3], C)
        buffer_base = b.to(tl.int64) * C * G + g
        d = load_rows(
            d_buffers[i], buffer_base, slot * G, in_buffer & (part == 0), D, BLOCK_D, tl.float32
        )
    return d


@triton.jit(do_not_specialize=["T", "S", "window", "C"])
def keys_kernel(
    q,
    k,
    v,
    visible,
    queries,
    origin,
    total,
    d_output,
    delta,
    d_buffers,
    d_keys,
    d_values,
    T,
    S,
    G,
    window,
    C,
    parts,
    TILE: tl.constexpr,
):
    """Stores d_keys and d_values, [parts, B, S, G, ...]; a part sums over TILE.SHARE query heads.

    Either may be None: for wide heads the sums of both take more registers than a thread has, so
    two launches compute the weights twice.
    d_buffers: the gradients of the final state's keys and values, [B, C, G, ...], its `position`
    and `end` (`circular_buffer.py`); None where the caller adds them.
    """
    FINE: tl.constexpr = TILE.TYPE.is_fp32()
    # Earliest keys first, for load balance: they are seen by the most queries.
    tiles = tl.cdiv(S, TILE.KEYS)
    heads = tl.num_programs(0) // tiles
    part = tl.program_id(0) % parts
    b, g = tl.program_id(0) % heads // parts // G, tl.program_id(0) // parts % G
    begin = tl.program_id(0) // heads * TILE.KEYS
    latest = tl.minimum(begin + TILE.KEYS, S) - 1
    start, num_before, num_inside, num_after = _query_blocks(
        queries, begin, latest, b, T, S, window, TILE
    )
    key_base, key_row, s = key_rows(begin, b, g, S, G, TILE.KEYS)
    key = load_rows(k, key_base, key_row, s < S, TILE.K, TILE.BLOCK_K, TILE.TYPE)
    if d_keys is not None:
        value = load_rows(v, key_base, key_row, s < S, TILE.V, TILE.BLOCK_V, TILE.TYPE)
        d_key = tl.zeros((TILE.KEYS, TILE.BLOCK_K), tl.float32)
    if d_values is not None:
        d_value = tl.zeros((TILE.KEYS, TILE.BLOCK_V), tl.float32)
    head = (g * parts + part) * TILE.SHARE
    for EDGE in tl.static_range(2):
        for i in range(num_before + num_after if EDGE else num_inside):
            first = start + block_number(i, num_before, num_inside, EDGE) * TILE.ROWS
            base, row, t = query_rows(first, b, head, T, G * parts * TILE.SHARE, TILE)
            valid = t < T if EDGE else None
            other = 0.0 if EDGE else None
            real = real_queries(visible, t, b, T) if EDGE or visible[0] is not None else None
            query = load_rows(q, base, row, real, TILE.K, TILE.BLOCK_K, TILE.TYPE)
            gradient = load_rows(d_output, base, row, real, TILE.V, TILE.BLOCK_V, TILE.TYPE)
            row_origin = tl.load(origin + base + row, valid, other)
            logits = tl.zeros((TILE.KEYS, TILE.ROWS), tl.float32)
            logits = product(key, tl.trans(query), logits, TILE.TYPE)
            if EDGE:
                low, high = visible_keys(visible, t, b, T, window)
                is_visible = (low[None, :] <= s[:, None]) & (s[:, None] <= high[None, :])
                logits = tl.where(is_visible, logits, float("-inf"))
            weights = exp_of_difference(logits, row_origin[None, :], FINE)
            if total is not None:
                row_total = tl.load(total + base + row, valid, 1.0 if EDGE else None)
                weights *= (1.0 / row_total)[None, :]
            if d_values is not None:
                d_value = product(weights, gradient, d_value, TILE.TYPE)
            if d_keys is not None:
                row_delta = tl.load(delta + base + row, valid, other)
                d_weights = product(value, tl.trans(gradient), tl.zeros_like(logits), TILE.TYPE)
                d_logits = weights * (d_weights - row_delta[None, :])
                if EDGE:
                    d_logits = tl.where((low == high)[None, :], 0.0, d_logits)
                d_key = product(d_logits, query, d_key, TILE.TYPE)
    key_base += part.to(tl.int64) * (heads // parts) * S
    if d_keys is not None:
        if d_buffers is not None:
            d_key += _buffer_gradient(d_buffers, 0, s, b, g, part, C, G, TILE.K, TILE.BLOCK_K)
        store_rows(d_keys, key_base, key_row, s < S, d_key, TILE.K, TILE.BLOCK_K)
    if d_values is not None:
        if d_buffers is not None:
            d_value += _buffer_gradient(d_buffers, 1, s, b, g, part, C, G, TILE.V, TILE.BLOCK_V)
        store_rows(d_values, key_base, key_row, s < S, d_value, TILE.V, TILE.BLOCK_V)
