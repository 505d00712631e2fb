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
    scale,
    kernel,
    kernel_2=None,
    kernel_3=None,
    kernel_4=None,
    kernel_scale=None,
    kernel_scale_2=None,
    kernel_scale_3=None,
    kernel_scale_4=None,
    kernel_zero=None,
    kernel_zero_2=None,
    kernel_zero_3=None,
    kernel_zero_4=None,
    bias=None,
    bias_2=None,
    bias_3=None,
    bias_4=None,
    residual=None,
    squares=None,
    epsilon=None,
    gate=None,
    output_scale=None,
    bits=8,
    block_size=None,
    row_dtype=None,
):
    """Returns a tuple of [B, N] in x's dtype, one for each kernel, or one with `gate`."""
    scales = kernel_scale, kernel_scale_2, kernel_scale_3, kernel_scale_4
    biases = bias, bias_2, bias_3, bias_4
    dtype = sum_dtype(x, scale, *scales, *biases, residual, squares)
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

    zeros = kernel_zero, kernel_zero_2, kernel_zero_3, kernel_zero_4
    matrices = zip((kernel, kernel_2, kernel_3, kernel_4), scales, zeros, biases, strict=True)
    outputs = [linear(*matrix) for matrix in matrices if matrix[0] is not None]
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
