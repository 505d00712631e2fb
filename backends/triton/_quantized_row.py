"""A row of x as integers, for products of four bytes at once: see `_quantized_products`.

A quantized row, as Keras has it, is integers of 8 bits. Other rows become fixed-point numbers of 16
or 24 bits, relative to the largest magnitude: two or three bytes with a sign each, of which the
first is worth 256 of the next.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.constants import ROW_EPSILON
from keras_recurrent.backends.triton._ahead import let_next_launch_begin, wait_for_launch_before
from keras_recurrent.backends.triton._common import IN_INTERPRETER
from keras_recurrent.backends.triton._math import reciprocal_root

_ROW_EPSILON = tl.constexpr(ROW_EPSILON)
# Added to a float32, this rounds to integers, which are then the lowest bits of the sum.
_ROUNDS = tl.constexpr(12582912.0)
# What the largest magnitude becomes: 127 of the highest byte's units, so that rounding fits.
_LARGEST_OF_2 = tl.constexpr(127.0 * 2**8)
_LARGEST_OF_3 = tl.constexpr(127.0 * 2**16)
_SMALLEST = tl.constexpr(1e-30)  # of largest magnitudes: below, their inverse is infinite


@triton.jit
def _rounded(value, SHORT: tl.constexpr):
    """As the row's dtype holds it: bfloat16 if SHORT, else float32."""
    if SHORT:
        if IN_INTERPRETER:  # which does not round, but leaves bits out
            bits = value.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            value = bits.to(tl.float32, bitcast=True)
        else:
            value = value.to(tl.bfloat16).to(tl.float32)
    return value


@triton.jit
def _whole(value):
    return (value + _ROUNDS).to(tl.int32, bitcast=True)


@triton.jit
def row_kernel(
    x,
    scale,
    row,
    unit,
    epsilon,
    K: tl.constexpr,
    ROW: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
    LIMBS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SHORT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Writes RMSNorm(x) as bytes, row [LIMBS, PADDED], and what one of the last is worth."""
    if AHEAD:
        let_next_launch_begin()
        wait_for_launch_before()
    k = tl.arange(0, ROW)
    value = tl.load(x + k, k < K, other=0.0).to(tl.float32)
    norm = 1.0
    if NORM:
        norm = reciprocal_root(tl.sum(value * value, 0) / K + epsilon)
    if scale is not None:
        value *= tl.load(scale + k, k < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), 0)
    # Integers hold neither NaN nor infinity: the unit is NaN if a number is one of them.
    flaw = tl.sum(value * 0.0, 0)
    if QUANTIZED:
        # Rounding keeps the order, so the largest number may be rounded in place of all.
        largest = _rounded(largest * norm, SHORT)
        factor = _rounded(tl.div_rn(127.0, _rounded(largest + _ROW_EPSILON, SHORT)), SHORT)
        value = _rounded(_rounded(value * norm, SHORT) * factor, SHORT)
        bits = _whole(tl.minimum(tl.maximum(value, -127.0), 127.0))
        tl.store(row + k, bits.to(tl.int8), k < PADDED)
        tl.store(unit, tl.div_rn(1.0, factor) + flaw)
    else:
        most = _LARGEST_OF_2 if LIMBS == 2 else _LARGEST_OF_3
        largest = tl.maximum(largest, _SMALLEST)
        value *= tl.div_rn(most, largest)
        high = value
        if LIMBS == 3:
            high = (value * (1.0 / 256) + _ROUNDS) - _ROUNDS
            low = _whole(tl.minimum(value - high * 256.0, 127.0))
            tl.store(row + 2 * PADDED + k, low.to(tl.int8), k < PADDED)
        # The lower byte has a sign: 128 more for the upper one, and its own highest bit flipped.
        bits = _whole(high + 128.0)
        tl.store(row + k, (bits >> 8).to(tl.int8), k < PADDED)
        tl.store(row + PADDED + k, (bits ^ 128).to(tl.int8), k < PADDED)
        tl.store(unit, tl.div_rn(largest * norm, most) + flaw)
