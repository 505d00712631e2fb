"""y = RMSNorm(x) W + b for up to four quantized matrices, then a gate or a residual.

See `backends/reference/norm_quantized_linear.py` for the format of the matrices.
"""

import keras
from keras import ops

from keras_recurrent.backends.constants import ROW_EPSILON
from keras_recurrent.portable._common import matmul, sum_dtype
from keras_recurrent.portable.gated_linear_unit import gated_linear_unit
from keras_recurrent.portable.norm_linear import normalize


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
):
    """Returns a tuple of [B, N] in x's dtype, one for each kernel, or one with `gate`.

    kernels, kernel_scales, kernel_zeros and biases: lists, with one entry per matrix.
    """
    dtype = sum_dtype(x, scale, *kernel_scales, *biases, residual, squares)
    y, factor = ops.cast(x, dtype), None
    if epsilon is not None:
        y = normalize(y, scale, epsilon, squares)
    if row_dtype is not None:
        y, factor = (ops.cast(t, dtype) for t in _quantize_row(ops.cast(y, x.dtype)))

    def linear(weight, divisor, zero, offset):
        if bits == 4:
            weight = keras.quantizers.unpack_int4(weight, divisor.shape[-1], axis=-1)
        weight, divisor = ops.cast(weight, dtype), ops.cast(divisor, dtype)
        if block_size is not None:
            weight = weight - _per_channel(ops.cast(zero, dtype), block_size, x.shape[1])
            product = matmul(y, weight * _per_channel(divisor, block_size, x.shape[1]))
        else:
            product = matmul(y, weight) / (divisor if factor is None else divisor * factor)
        return product if offset is None else product + ops.cast(offset, dtype)

    matrices = zip(kernels, kernel_scales, kernel_zeros, biases, strict=True)
    outputs = [linear(*matrix) for matrix in matrices]
    if gate is not None:
        outputs = [gated_linear_unit(outputs[0], outputs[1], gate)]
    if output_scale is not None:
        outputs = [output_scale * output for output in outputs]
    if residual is not None:
        outputs[0] = outputs[0] + ops.cast(residual, dtype)
    return tuple(ops.cast(output, x.dtype) for output in outputs)


def _quantize_row(y):
    """Returns the row as integers from -127 to 127, and the factor that it was multiplied by."""
    largest = ops.max(ops.abs(y), axis=-1, keepdims=True) + ROW_EPSILON
    factor = ops.full_like(largest, 127) / largest  # 127 / largest rounds a reciprocal on torch
    return ops.clip(ops.round(y * factor), -127, 127), factor


def _per_channel(x, block_size, channels):
    """Repeats the rows of blocks for each of their channels."""
    return ops.repeat(x, block_size, axis=0)[:channels]
