"""The products of `quantized_products.py` for Triton's interpreter, which runs no PTX."""

import triton
import triton.language as tl

from .._decoding.norm_linear_products import load_squares
from .._device.common import next_power_of_2_in_kernel
from .quantized_row import block_sum_and_max, quantize, row_scales


@triton.jit
def project_row(x, scale, squares, weights, residual, n, columns, epsilon, PRODUCT: tl.constexpr):
    """Returns the sums of the columns n of each weight in float32, their unit, and the residual."""
    kernels, kernel_scales, kernel_zeros = weights
    SHORT: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    K: tl.constexpr = PRODUCT.K
    BITS: tl.constexpr = PRODUCT.BITS
    ROW: tl.constexpr = next_power_of_2_in_kernel(K)
    k = tl.arange(0, ROW)
    value = tl.load(x + k, k < K, other=0.0).to(tl.float32)
    row_squares = value * value
    if scale is not None:
        value *= tl.load(scale + k, k < K, other=0.0).to(tl.float32)
    row_squares, largest = block_sum_and_max(row_squares, tl.abs(value))
    if squares is not None:
        row_squares = tl.sum(load_squares(squares, tl.arange(0, 1), 1, PRODUCT.NUM_SQUARES))
    norm, factor, unit = row_scales(row_squares, largest, epsilon, SHORT, PRODUCT)
    row = tl.zeros((ROW,), tl.int64)
    for limb in quantize(value, norm, factor, SHORT, PRODUCT):
        row = row * 256 + ((limb << 24) >> 24)
    valid = (k < K)[:, None] & (n < columns)[None, :]
    results = ()
    for i in tl.static_range(len(kernels)):
        offsets = k[:, None] * (columns * BITS // 8) + (n * BITS // 8)[None, :]
        weight = tl.load(kernels[i] + offsets, valid, other=0).to(tl.int32)
        if BITS == 4:
            weight = (weight << (28 - 4 * (n % 2))[None, :]) >> 28
        if PRODUCT.BLOCK_SIZE:
            offsets = (k // PRODUCT.BLOCK_SIZE)[:, None] * columns + n[None, :]
            weight -= tl.load(kernel_zeros[i] + offsets, valid, other=0)
            factors = tl.load(kernel_scales[i] + offsets, valid, other=0.0).to(tl.float32)
            products = (row[:, None] * weight).to(tl.float32) * factors
        else:
            products = row[:, None] * weight
        results = results + (tl.sum(products, 0).to(tl.float32),)
    row_residual = 0.0
    if residual is not None:
        row_residual = tl.load(residual + n, n < columns, other=0.0)
    return results, unit, (row_residual,)
