"""y = RMSNorm(x) W + b for up to four matrices, then a gate or a residual.

x is [B, K]; ε None: no norm. With `squares`, [B, U], x has been multiplied by the norm's weight and
perhaps by a gate, and `squares` add up to the sum of its squares before. With `gate` the output is
y = activation(y_1) * y_2, or, with a third matrix, y W_3 + b_3. With `activation` "squared_relu",
outputs become max(y, 0)². `output_scale` multiplies them before the residual is added.
"""

import numpy as np

from ..constants import ROW_SQUARES_GROUP
from ._common import cast, group_squares, product
from .gated_linear_unit import gated_linear_unit
from .rms_norm import rms_norm


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
    dtype=np.float64,
):
    """kernels: a list of [K, N]; biases: a list of [N] or None. scale: [K] or None.

    Returns a tuple of [B, N], one for each kernel, or one with `gate`. With `next_scale`,
    [N], of a single output y, it ends with y * next_scale and the sums of the squares of groups of
    columns of y, [B, ceil(N / 256)].
    """
    (x,) = cast(dtype, x)
    if epsilon is not None:
        x = normalize(x, scale, epsilon, squares, dtype)

    def linear(x, weight, offset):
        y = product(x, *cast(dtype, weight))
        return y if offset is None else y + cast(dtype, offset)[0]

    products = [*zip(kernels, biases, strict=True)]
    if gate is not None:
        to_gate, to_up, *products = products
        x = gated_linear_unit(linear(x, *to_gate), linear(x, *to_up), gate, dtype)
    outputs = [linear(x, *weights) for weights in products] or [x]
    if activation == "squared_relu":
        outputs = [np.maximum(y, 0) ** 2 for y in outputs]
    if output_scale is not None:
        outputs = [x.dtype.type(output_scale) * y for y in outputs]
    if residual is not None:
        outputs[0] = outputs[0] + cast(dtype, residual)[0]
    if next_scale is not None:
        (y,) = outputs
        outputs += [y * cast(dtype, next_scale)[0], group_squares(y, ROW_SQUARES_GROUP)]
    return tuple(outputs)


def normalize(x, scale, epsilon, squares, dtype):
    """RMSNorm(x); with `squares`, of x that has been multiplied by the norm's weight."""
    if squares is None:
        return rms_norm(x, scale, epsilon, dtype)
    mean = cast(dtype, squares)[0].sum(1, keepdims=True) / x.dtype.type(x.shape[1])
    return x / np.sqrt(mean + x.dtype.type(epsilon))
