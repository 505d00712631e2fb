"""y = RMSNorm(x) W + b for up to four quantized matrices, then a gate or a residual.

x, ε, `squares` and `output_scale` are those of `norm_linear`. With `gate` the output is
activation(y_1) * y_2. W is [K, N] int8, or
with 4 bits [K, ceil(N / 2)], where a byte holds two adjacent channels, the first one in its lower
half:

    W = kernel / kernel_scale                                kernel_scale [N]
    W = (kernel - kernel_zero) * kernel_scale                both [blocks of channels, N]

This is the format of Keras's `Dense`. With `row_dtype`, the normalized row is rounded to that
dtype, multiplied in it by 127 / (max |row| + 1e-7), and rounded to integers; products are divided
by this factor.
"""

import numpy as np

from ..constants import ROW_EPSILON
from ._common import cast, product
from .gated_linear_unit import gated_linear_unit
from .norm_linear import normalize


def norm_quantized_linear(
    x,
    kernels,
    kernel_scales,
    kernel_zeros,
    biases,
    scale=None,
    residual=None,
    squares=None,
    epsilon=None,
    gate=None,
    output_scale=None,
    bits=8,
    block_size=None,
    row_dtype=None,
    dtype=np.float64,
):
    """x: [B, K]; kernels, kernel_scales, kernel_zeros and biases: lists, one entry per matrix.

    Returns a tuple of [B, N], one for each kernel, or one with `gate`.
    """
    (x,) = cast(dtype, x)
    factor = np.ones((len(x), 1), dtype)
    if epsilon is not None:
        x = normalize(x, scale, epsilon, squares, dtype)
    if row_dtype is not None:
        x, factor = cast(dtype, *quantized_row(rounded_row(x, row_dtype)))
    outputs = []
    matrices = zip(kernels, kernel_scales, kernel_zeros, biases, strict=True)
    for weight, divisor, zero, offset in matrices:
        weight, divisor = cast(dtype, _integers(weight, divisor.shape[-1], bits), divisor)
        if block_size is None:
            y = product(x, weight) / (divisor * factor)
        else:
            block = np.arange(x.shape[1]) // block_size
            y = product(x, (weight - cast(dtype, zero)[0][block]) * divisor[block])
        outputs.append(y if offset is None else y + cast(dtype, offset)[0])
    if gate is not None:
        outputs = [gated_linear_unit(outputs[0], outputs[1], gate, dtype)]
    if output_scale is not None:
        outputs = [x.dtype.type(output_scale) * y for y in outputs]
    if residual is not None:
        outputs[0] = outputs[0] + cast(dtype, residual)[0]
    return tuple(outputs)


def rounded_row(x, dtype):
    """x rounded to a dtype, given as a string."""
    if dtype == "bfloat16":
        import ml_dtypes

        return x.astype("float32").astype(ml_dtypes.bfloat16)
    return x.astype(dtype)


def quantized_row(row):
    """The row as integers up to 127, and the factor that it was multiplied by, in its dtype."""
    one = row.dtype.type
    factor = one(127) / (np.abs(row).max(-1, keepdims=True) + one(ROW_EPSILON))
    return np.clip(np.round(row * factor), one(-127), one(127)), factor


def _integers(kernel, columns, bits):
    if bits == 8:
        return kernel
    kernel = np.asarray(kernel).astype(np.int8)
    low, high = ((kernel & 15) ^ 8) - 8, kernel >> 4
    return np.stack([low, high], -1).reshape(len(kernel), -1)[:, :columns]
