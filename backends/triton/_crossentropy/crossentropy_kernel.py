"""The cross-entropy kernel: losses, argmax tokens and the gradient of a chunk of logits.

A program goes through one row of logits once. The sum of its exponentials is known only at the end,
so the gradient

    dlogits_v = w (exp(z_v) / Σ_u exp(z_u) - [v = token])

is stored without the factor w / Σ of the whole row, which the following products apply.
Exponentials are relative to the largest logit of the first tile; if a later tile has a much larger
one, stored numbers are rescaled to it.
"""

import triton
import triton.language as tl

from .._device.math import exp, exp_keeping_nan, tanh
from .._runtime.launch import Array, next_power_of_2

_LANE_SIZE = 4  # logits, a vector of 16 bytes
_TILE_SIZE = 2048
# The largest difference of a logit and the origin of the exponentials: e^40 times the size of the
# vocabulary is far below the largest number of bfloat16 and float32.
_HEADROOM = tl.constexpr(40.0)


@triton.jit
def _apply_cap(z, cap, inverse, CAPPED: tl.constexpr, FINE: tl.constexpr):
    if CAPPED:
        z = cap * tanh(z * inverse, FINE)
    return z


@triton.jit
def _uncap_gradient(d, z, inverse, CAPPED: tl.constexpr):
    """The gradient of a logit before the soft cap, from the gradient of the capped logit z."""
    if CAPPED:
        bounded = tl.maximum(z * inverse, -1.0)  # a tile has -inf beyond the end of its row
        d *= 1.0 - bounded * bounded
    return d


@triton.jit
def chunk_kernel(
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
    token_logit = _apply_cap(tl.load(logits + token, known, other=0.0), cap, inverse, CAPPED, FINE)
    sums = tl.zeros((LANES,), tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    origin, best_index = largest, tl.full((), 0, tl.int32)
    next_logits = tl.load(logits + positions, positions < V, other=0.0)
    for start in tl.range(0, V, BLOCK):
        v = start + positions
        z = tl.where(v < V, _apply_cap(next_logits, cap, inverse, CAPPED, FINE), float("-inf"))
        next_logits = tl.load(logits + v + BLOCK, v + BLOCK < V, other=0.0)
        peak = tl.max(tl.max(z, 1), 0)
        if peak > largest:
            largest = peak
            best_index = tl.min(tl.min(tl.where(z == peak, v, V), 1), 0)
        if peak > origin + _HEADROOM:
            smaller = exp(tl.maximum(origin - peak, -200.0), True)
            sums *= smaller
            if d_logits is not None:
                tl.debug_barrier()
                for tile_start in tl.range(0, start, BLOCK):
                    pointers = d_logits + tile_start + positions
                    d = tl.load(pointers).to(tl.float32) * smaller
                    tl.store(pointers, d.to(d_logits.dtype.element_ty))
            origin = peak
        e = exp_keeping_nan(z - origin, FINE)
        sums += tl.sum(e, 1)
        if d_logits is not None:
            d = _uncap_gradient(e, z, inverse, CAPPED)
            tl.store(d_logits + v, d.to(d_logits.dtype.element_ty), v < V)
    total = tl.sum(sums, 0)
    tl.store(losses + row, tl.where(known, tl.log(total) + (origin - token_logit), float("nan")))
    tl.store(best + row, best_index)
    if d_logits is not None:
        tl.debug_barrier()  # all numbers of the row are stored before one of them is replaced
        d = _uncap_gradient(
            exp_keeping_nan(token_logit - origin, FINE) - total, token_logit, inverse, CAPPED
        )
        tl.store(d_logits + token, d.to(d_logits.dtype.element_ty), known)
        weight = tl.where(known, tl.load(weights + row), float("nan"))
        tl.store(factors + row, weight / total)


def output_arrays(rows):
    """The kernel's outputs in addition to the gradient: losses, factors, argmax tokens."""
    return Array((rows,), "float32"), Array((rows,), "float32"), Array((rows,), "int32")


def options(vocabulary, capped, fine):
    """The constants and options of a launch. fine: boolean, x is float32, not of 16 bits."""
    block = max(_LANE_SIZE, min(_TILE_SIZE, next_power_of_2(vocabulary)))
    return {
        "V": vocabulary,
        "CAPPED": capped,
        "FINE": fine,
        "BLOCK": block,
        "LANE_SIZE": _LANE_SIZE,
        "num_warps": max(1, block // 256),
        "maxnreg": 96 if fine else None,  # with the 64 that ptxas takes for itself, some spill
    }
