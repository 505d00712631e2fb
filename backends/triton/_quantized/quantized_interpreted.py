"""As `quantized_products.py`, for Triton's interpreter, which runs no instructions of a GPU."""

import triton
import triton.language as tl

from .quantized_row import integers, measured, of_all


@triton.jit
def of_one_row(
    x,
    scale,
    kernels,
    kernel_scales,
    kernel_zeros,
    residual,
    n,
    columns,
    epsilon,
    K: tl.constexpr,
    NORM: tl.constexpr,
    LIMBS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
):
    """The sums of the columns n, map after map, float32, what one is worth, and the residual."""
    SHORT: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    k = tl.arange(0, ROW)
    value = tl.load(x + k, k < K, other=0.0).to(tl.float32)
    squares = value * value
    if scale is not None:
        value *= tl.load(scale + k, k < K, other=0.0).to(tl.float32)
    squares, largest = of_all(squares, tl.abs(value))
    norm, factor, unit = measured(*(squares, largest, epsilon, K, NORM, LIMBS, QUANTIZED, SHORT))
    row = tl.zeros((ROW,), tl.int64)
    for limb in integers(value, norm, factor, LIMBS, QUANTIZED, SHORT):
        row = row * 256 + ((limb << 24) >> 24)
    valid = (k < K)[:, None] & (n < columns)[None, :]
    results = ()
    for i in tl.static_range(len(kernels)):
        place = k[:, None] * (columns * BITS // 8) + (n * BITS // 8)[None, :]
        weight = tl.load(kernels[i] + place, valid, other=0).to(tl.int32)
        if BITS == 4:
            weight = (weight << (28 - 4 * (n % 2))[None, :]) >> 28
        if BLOCK_SIZE:
            place = (k // BLOCK_SIZE)[:, None] * columns + n[None, :]
            weight -= tl.load(kernel_zeros[i] + place, valid, other=0)
            factors = tl.load(kernel_scales[i] + place, valid, other=0.0).to(tl.float32)
            products = (row[:, None] * weight).to(tl.float32) * factors
        else:
            products = row[:, None] * weight
        results = results + (tl.sum(products, 0).to(tl.float32),)
    before = 0.0
    if residual is not None:
        before = tl.load(residual + n, n < columns, other=0.0)
    return results, unit, (before,)
