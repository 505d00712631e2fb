"""What a piece of logits becomes: the losses of its rows, the best tokens, and the gradient.

A program goes through a row once. As the sum of a row's exponentials is known only at its end, the
gradient

    dlogits_v = w (exp(z_v) / Σ_u exp(z_u) - [v = token])

is written without its factor w / Σ, which belongs to the whole row and is left to the products that
follow. Exponentials are relative to the largest logit of the first tile; where a later tile has a
much larger one, what was written is made relative to that.
"""

import triton
import triton.language as tl

from .._device.math import exp, exp_keeping_nan, tanh
from .._runtime.launch import Array

_LANE_SIZE = 4  # logits, a vector of 16 bytes
_TILE_SIZE = 2048
# By how much a logit may be above the origin of the exponentials: e^40 times as many as there are
# words is far from the largest number of bfloat16 and float32.
_HEADROOM = tl.constexpr(40.0)


@triton.jit
def _capped(z, cap, inverse, CAPPED: tl.constexpr, FINE: tl.constexpr):
    if CAPPED:
        z = cap * tanh(z * inverse, FINE)
    return z


@triton.jit
def _before_cap(d, z, inverse, CAPPED: tl.constexpr):
    """The gradient of what a capped logit z was before the cap, from that of z."""
    if CAPPED:
        bounded = tl.maximum(z * inverse, -1.0)  # a tile goes on beyond its row with -inf
        d *= 1.0 - bounded * bounded
    return d


@triton.jit
def piece_kernel(
    logits,
    tokens,
    weights,
    d_logits,
    losses,
    factors,
    best,
    cap,
    V: tl.constexpr,
    CAPPED: tl.constexpr,
    FINE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE_SIZE: tl.constexpr,
):
    LANES: tl.constexpr = BLOCK // LANE_SIZE
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    if d_logits is not None:
        d_logits += row * V
    lane, each = tl.arange(0, LANES)[:, None], tl.arange(0, LANE_SIZE)[None, :]
    if V % LANE_SIZE == 0:
        positions = lane * LANE_SIZE + each
    else:  # rows are not aligned for vectors: adjacent lanes load adjacent logits
        positions = each * LANES + lane
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < V)
    inverse = 1.0
    if CAPPED:
        inverse = 1.0 / cap
    own = _capped(tl.load(logits + token, known, other=0.0), cap, inverse, CAPPED, FINE)
    sums = tl.zeros((LANES,), tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    origin, place = largest, tl.full((), 0, tl.int32)
    ahead = tl.load(logits + positions, positions < V, other=0.0)
    for start in tl.range(0, V, BLOCK):
        v = start + positions
        z = tl.where(v < V, _capped(ahead, cap, inverse, CAPPED, FINE), float("-inf"))
        ahead = tl.load(logits + v + BLOCK, v + BLOCK < V, other=0.0)
        peak = tl.max(tl.max(z, 1), 0)
        if peak > largest:
            largest = peak
            place = tl.min(tl.min(tl.where(z == peak, v, V), 1), 0)
        if peak > origin + _HEADROOM:
            smaller = exp(tl.maximum(origin - peak, -200.0), True)
            sums *= smaller
            if d_logits is not None:
                tl.debug_barrier()
                for before in tl.range(0, start, BLOCK):
                    written = d_logits + before + positions
                    d = tl.load(written).to(tl.float32) * smaller
                    tl.store(written, d.to(d_logits.dtype.element_ty))
            origin = peak
        e = exp_keeping_nan(z - origin, FINE)
        sums += tl.sum(e, 1)
        if d_logits is not None:
            d = _before_cap(e, z, inverse, CAPPED)
            tl.store(d_logits + v, d.to(d_logits.dtype.element_ty), v < V)
    total = tl.sum(sums, 0)
    tl.store(losses + row, tl.where(known, tl.log(total) + (origin - own), float("nan")))
    tl.store(best + row, place)
    if d_logits is not None:
        tl.debug_barrier()  # the row's numbers are there before one of them is replaced
        d = _before_cap(exp_keeping_nan(own - origin, FINE) - total, own, inverse, CAPPED)
        tl.store(d_logits + token, d.to(d_logits.dtype.element_ty), known)
        weight = tl.where(known, tl.load(weights + row), float("nan"))
        tl.store(factors + row, weight / total)


def written(rows):
    """What the kernel writes beside the gradient: losses, factors, best tokens."""
    return Array((rows,), "float32"), Array((rows,), "float32"), Array((rows,), "int32")


def options(vocabulary, capped, fine):
    """The constants of a launch. fine: whether x is float32, not of 16 bits."""
    block = max(_LANE_SIZE, min(_TILE_SIZE, triton.next_power_of_2(vocabulary)))
    return {
        "V": vocabulary,
        "CAPPED": capped,
        "FINE": fine,
        "BLOCK": block,
        "LANE_SIZE": _LANE_SIZE,
        "num_warps": max(1, block // 256),
        "maxnreg": 96 if fine else None,  # with the 64 that ptxas takes for itself, some spill
    }
