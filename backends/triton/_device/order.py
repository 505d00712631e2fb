"""Numbers packed with their positions into 64-bit integers that are ordered like the numbers.

NaN is above all, -0 equals 0, and of equal numbers the first position is the largest integer.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**63))  # below any packed number
_MAX_INT = tl.constexpr(2**31 - 1)
_POSITIONS = tl.constexpr(2**31)


@triton.jit
def packed(value, position):
    """Packs float32 numbers and their int32 positions."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    order = tl.where(value == value, tl.where(bits < 0, bits ^ _MAX_INT, bits), _MAX_INT)
    # `^ _MAX_INT` counts positions from the end.
    return order.to(tl.int64) * _POSITIONS + (position ^ _MAX_INT).to(tl.int64)


@triton.jit
def position_of(key):
    """Returns the position of a packed number, int32."""
    return (key & _MAX_INT).to(tl.int32) ^ _MAX_INT


@triton.jit
def number_of(key):
    """Returns a packed number, float32."""
    order = (key >> 31).to(tl.int32)
    return tl.where(order < 0, order ^ _MAX_INT, order).to(tl.float32, bitcast=True)
