"""Matrix products of the Triton kernels, and their precision.

SHORT, for bfloat16 tensors: operands in bfloat16, what was computed from them rounded to it, sums
in float32. Other operands are float32 and meet as "bf16x6", six products of their parts of 8 bits,
which keep the digits of float32 on tensor cores, as "ieee" would off them. float16 goes there,
too: a state may lie beyond its range.

Where tiles have 64 rows, products are asynchronous ones, and each holds descriptors of what it
reads in registers of their own. A kernel with more of them than there are is compiled wrongly for
Hopper by what Triton 3.6 and 3.7 bring along (ptxas 12.8): it read beyond its shared memory. Tiles
of 32 rows, in the large kernels, need none.

Triton's compiler got dot(x.T, y) wrong on Hopper where x had been computed by another dot (Triton
issue 6124, flash-linear-attention issues 640 and 984). Here a first operand is never the transpose
of anything computed: its transpose is computed instead.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._common import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)
PRECISION = tl.constexpr("ieee" if INTERPRETED else "bf16x6")


@triton.jit
def operand(x, SHORT: tl.constexpr):
    """x as products take it. The interpreter keeps bfloat16 in integers: there it is float32."""
    if SHORT:
        if _PLAIN:
            bits = x.to(tl.float32).to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            x = bits.to(tl.float32, bitcast=True)
        else:
            x = x.to(tl.bfloat16)
    return x


@triton.jit
def product(a, b, total, SHORT: tl.constexpr):
    """total + a b, in float32."""
    if SHORT:
        total = tl.dot(operand(a, True), operand(b, True), total)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def ones(square):
    """1 for each row of what a product made, also where that is infinite or, on a GPU, NaN.

    There may be several products, in a batch. The compiler does not see what comes out, and lays
    out what is made of it as it laid out the product: a first operand then is made in the registers
    where the next product takes it.
    """
    return tl.minimum(tl.maximum(tl.sum(square, len(square.shape) - 1), 1.0), 1.0)


@triton.jit
def sums(which, x, PARTS: tl.constexpr):
    """which x: for each row of `which`, 0 or 1, the sum of those rows of x that it names.

    x is the sum of PARTS numbers of bfloat16, 8 bits each: 1 if it is bfloat16, 3 for all its bits.
    """
    part = operand(x, True)
    total = tl.dot(which, part)
    for _ in tl.static_range(PARTS - 1):
        x = x - part.to(tl.float32)
        part = operand(x, True)
        total = tl.dot(which, part, total)
    return total


@triton.jit
def sums_of_columns(x, which, PARTS: tl.constexpr):
    """x which: for each column of `which`, True or False, the sum of the columns of x it names."""
    which = tl.where(which, 1.0, 0.0)
    if not _PLAIN:
        which = which.to(tl.bfloat16)
    part = operand(x, True)
    total = tl.dot(part, which)
    for _ in tl.static_range(PARTS - 1):
        x = x - part.to(tl.float32)
        part = operand(x, True)
        total = tl.dot(part, which, total)
    return total
