"""y = RMSNorm(x) W + b for up to four matrices, then a gate or a residual."""

from keras import ops

from keras_recurrent.backends.constants import ROW_SQUARES_GROUP
from keras_recurrent.portable._common import group_squares, matmul, sum_dtype
from keras_recurrent.portable.gated_linear_unit import gated_linear_unit
from keras_recurrent.portable.rms_norm import rms_norm


def norm_linear(
    x,
    kernels,
    biases,
    scale=None,
    residual=None,
    squares=None,
    next_scale=None,
    epsilon=None,
    gate=None,
    activation=None,
    output_scale=None,
):
    """x: [B, K]; kernels: a list of [K, N]; biases: a list of [N] or None; scale: [K] or None.

    Returns a tuple of [B, N] in x's dtype. With `next_scale`, [N], it ends with y * next_scale and
    sums of squares of y, [B, U].
    """
    dtype = sum_dtype(x, scale, *kernels, *biases, residual, squares, next_scale)
    y = ops.cast(x, dtype)
    if epsilon is not None:
        y = normalize(y, scale, epsilon, squares)

    def linear(x, weight, offset):
        y = matmul(x, ops.cast(weight, dtype))
        return y if offset is None else y + ops.cast(offset, dtype)

    products = [*zip(kernels, biases, strict=True)]
    if gate is not None:
        to_gate, to_up, *products = products
        y = gated_linear_unit(linear(y, *to_gate), linear(y, *to_up), gate)
    outputs = [linear(y, *weights) for weights in products] or [y]
    if activation == "squared_relu":
        outputs = [ops.square(ops.relu(output)) for output in outputs]
    if output_scale is not None:
        outputs = [output_scale * output for output in outputs]
    if residual is not None:
        outputs[0] = outputs[0] + ops.cast(residual, dtype)
    results = [ops.cast(output, x.dtype) for output in outputs]
    if next_scale is not None:
        scaled = ops.cast(outputs[0] * ops.cast(next_scale, dtype), x.dtype)
        results += [scaled, group_squares(outputs[0], ROW_SQUARES_GROUP)]
    return tuple(results)


def normalize(x, scale, epsilon, squares):
    """RMSNorm(x); with `squares`, of x that has been multiplied by the norm's weight."""
    if squares is None:
        return rms_norm(x, scale, epsilon)
    mean = ops.sum(ops.cast(squares, x.dtype), axis=1, keepdims=True) / x.shape[1]
    return x / ops.sqrt(mean + epsilon)
