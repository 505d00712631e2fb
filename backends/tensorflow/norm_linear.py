"""y = RMSNorm(x) W + b for up to three matrices, then a gate or a residual; in float32."""

import tensorflow as tf

from ._common import accumulation_dtype
from .gated_linear_unit import gated_linear_unit
from .rms_norm import rms_norm


def norm_linear(
    x,
    scale,
    kernel,
    kernel_2=None,
    kernel_3=None,
    bias=None,
    bias_2=None,
    bias_3=None,
    residual=None,
    epsilon=None,
    gate=None,
):
    """x: [B, K]; scale: [K]; kernels: [K, N] each. Returns a tuple of [B, N] in x's dtype."""
    tensors = x, scale, kernel, kernel_2, kernel_3, bias, bias_2, bias_3, residual
    dtype = accumulation_dtype(*tensors)
    y = tf.cast(x, dtype)
    if epsilon is not None:
        y = rms_norm(y, scale, epsilon)

    def linear(x, weight, offset):
        y = x @ tf.cast(weight, dtype)
        return y if offset is None else y + tf.cast(offset, dtype)

    if gate is not None:
        y = gated_linear_unit(linear(y, kernel, bias), linear(y, kernel_2, bias_2), gate)
        outputs = [y if kernel_3 is None else linear(y, kernel_3, bias_3)]
    else:
        maps = (kernel, bias), (kernel_2, bias_2), (kernel_3, bias_3)
        outputs = [linear(y, *weights) for weights in maps if weights[0] is not None]
    if residual is not None:
        outputs[0] = outputs[0] + tf.cast(residual, dtype)
    return tuple(tf.cast(output, x.dtype) for output in outputs)
