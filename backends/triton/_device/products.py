"""Matrix products of the Triton kernels, and their precision.

SHORT, for bfloat16 tensors: operands are bfloat16, or are rounded to it if they were computed, and
sums are float32. Otherwise operands are float32 and multiplied as "bf16x6": each is split into
bfloat16 parts, and six products of parts have the precision of float32. They run on tensor cores,
while "ieee" would not. float16 tensors are multiplied as float32, since a state may exceed the
range of float16.

Products of tiles with 64 rows are asynchronous on Hopper, and each needs registers for descriptors
of its operands. ptxas 12.8, which comes with Triton 3.6 and 3.7, miscompiles a kernel with more
descriptors than registers for them: it read beyond its shared memory. The large kernels therefore
use tiles of 32 rows, whose products are not asynchronous; `norm_linear` has few enough products.

Triton's compiler got dot(x.T, y) wrong on Hopper where x was the result of another dot (Triton
issue 6124, flash-linear-attention issues 640 and 984). The first operand of a product is therefore
never the transpose of a computed tensor: kernels compute the transpose itself.
"""

import triton
import triton.language as tl

from .common import IN_INTERPRETER, INTERPRETED

PRECISION = tl.constexpr("ieee" if INTERPRETED else "bf16x6")


@triton.jit
def operand(x, SHORT: tl.constexpr):
    """Converts x to the dtype of operands.

    The interpreter stores bfloat16 as integers, so there x is float32, rounded to bfloat16.
    """
    if SHORT:
        if IN_INTERPRETER:
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
    """Layout hint: ones that the compiler must derive from `square`, the result of products.

    Tensors that are computed from them keep the register layout of products, and become the first
    operand of the next product without a conversion. Returns 1 for each row of `square` (which may
    be a batch), even if it contains infinities or, on a GPU, NaN.
    """
    return tl.minimum(tl.maximum(tl.sum(square, len(square.shape) - 1), 1.0), 1.0)


@triton.jit
def sum_rows(mask, x, PARTS: tl.constexpr):
    """mask x: for each row of `mask`, which has 0 and 1, the sum of the rows of x at its ones.

    x is split into PARTS bfloat16 numbers of 8 bits: 1 part is exact for bfloat16, 3 for float32.
    """
    part = operand(x, True)
    total = tl.dot(mask, part)
    for _ in tl.static_range(PARTS - 1):
        x = x - part.to(tl.float32)
        part = operand(x, True)
        total = tl.dot(mask, part, total)
    return total


@triton.jit
def sum_columns(x, mask, PARTS: tl.constexpr):
    """x mask: for each column of the boolean `mask`, the sum of the columns of x that it marks.

    PARTS: see `sum_rows`.
    """
    mask = tl.where(mask, 1.0, 0.0)
    if not IN_INTERPRETER:
        mask = mask.to(tl.bfloat16)
    part = operand(x, True)
    total = tl.dot(part, mask)
    for _ in tl.static_range(PARTS - 1):
        x = x - part.to(tl.float32)
        part = operand(x, True)
        total = tl.dot(part, mask, total)
    return total
