"""y = RMSNorm(x) W + b for up to three quantized matrices, then a gate or a residual."""

import tensorflow as tf

from ..constants import ROW_EPSILON
from ._common import accumulation_dtype
from .gated_linear_unit import gated_linear_unit
from .rms_norm import rms_norm


def norm_quantized_linear(
    x,
    scale,
    kernel,
    kernel_2=None,
    kernel_3=None,
    kernel_scale=None,
    kernel_scale_2=None,
    kernel_scale_3=None,
    kernel_zero=None,
    kernel_zero_2=None,
    kernel_zero_3=None,
    bias=None,
    bias_2=None,
    bias_3=None,
    residual=None,
    epsilon=None,
    gate=None,
    bits=8,
    block_size=None,
    row_dtype=None,
):
    """As in `backends/reference`. Returns a tuple of [B, N] in x's dtype."""
    scales = kernel_scale, kernel_scale_2, kernel_scale_3
    dtype = accumulation_dtype(x, scale, *scales, bias, bias_2, bias_3, residual)
    y, factor = tf.cast(x, dtype), None
    if epsilon is not None:
        y = rms_norm(y, scale, epsilon)
    if row_dtype is not None:
        y, factor = (tf.cast(t, dtype) for t in _quantized(tf.cast(y, x.dtype)))
    outputs = []
    for weight, divisor, zero, offset in zip(
        (kernel, kernel_2, kernel_3),
        scales,
        (kernel_zero, kernel_zero_2, kernel_zero_3),
        (bias, bias_2, bias_3),
        strict=True,
    ):
        if weight is None:
            continue
        weight, divisor = _weight(weight, divisor.shape[-1], bits, dtype), tf.cast(divisor, dtype)
        if block_size is not None:
            origin, unit = (
                _of_channels(t, block_size, x.shape[1]) for t in (tf.cast(zero, dtype), divisor)
            )
            weight = (weight - origin) * unit
        product = y @ weight
        if block_size is None:
            product = product / (divisor if factor is None else divisor * factor)
        outputs.append(product if offset is None else product + tf.cast(offset, dtype))
    if gate is not None:
        outputs = [gated_linear_unit(outputs[0], outputs[1], activation=gate)]
    if residual is not None:
        outputs[0] = outputs[0] + tf.cast(residual, dtype)
    return tuple(tf.cast(output, x.dtype) for output in outputs)


def _quantized(y):
    """The numbers of rows as integers up to 127, and by what they were multiplied."""
    largest = tf.reduce_max(tf.abs(y), -1, keepdims=True)
    factor = tf.cast(127, y.dtype) / (largest + tf.cast(ROW_EPSILON, y.dtype))
    return tf.clip_by_value(tf.round(y * factor), -127, 127), factor


def _weight(kernel, columns, bits, dtype):
    """The integers of a kernel; of 4 bits, a byte holds two neighbors, the first one below."""
    if bits == 4:
        byte = tf.cast(kernel, tf.int32)
        low, high = tf.bitwise.bitwise_xor(byte & 15, 8) - 8, tf.bitwise.right_shift(byte, 4)
        kernel = tf.reshape(tf.stack([low, high], -1), (kernel.shape[0], -1))[:, :columns]
    return tf.cast(kernel, dtype)


def _of_channels(x, block_size, channels):
    """What blocks of channels have, for each channel."""
    return tf.repeat(x, block_size, 0)[:channels]
