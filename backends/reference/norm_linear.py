"""y = RMSNorm(x) W + b for up to four matrices, then a gate or a residual.

x is [B, K]; ε None: no norm. With `squares`, [B, U], x has been multiplied by the norm's weight and
perhaps by a gate, and `squares` add up to the sum of its squares before. With `gate` the output is
y = activation(y_1) * y_2, or, with a third matrix, y W_3 + b_3. Outputs are multiplied by
`output_scale` before the residual is added.
"""

import numpy as np

from ..constants import ROW_SQUARES_GROUP
from ._common import cast, group_squares, product
from .gated_linear_unit import gated_linear_unit
from .rms_norm import rms_norm


def norm_linear(
    x,
    scale,
    kernel,
    kernel_2=None,
    kernel_3=None,
    kernel_4=None,
    bias=None,
    bias_2=None,
    bias_3=None,
    bias_4=None,
    residual=None,
    squares=None,
    next_scale=None,
    epsilon=None,
    gate=None,
    output_scale=None,
    dtype=np.float64,
):
    """Returns a tuple of [B, N], one for each kernel, or one with `gate`.

    With `next_scale`, [N], of a single output y, it ends with y * next_scale and the sums of the
    squares of groups of columns of y, [B, ceil(N / 256)].
    """
    (x,) = cast(dtype, x)
    if epsilon is not None:
        x = normalize(x, scale, epsilon, squares, dtype)

    def linear(x, weight, offset):
        y = product(x, *cast(dtype, weight))
        return y if offset is None else y + cast(dtype, offset)[0]

    if gate is not None:
        x = gated_linear_unit(linear(x, kernel, bias), linear(x, kernel_2, bias_2), gate, dtype)
        outputs = [x if kernel_3 is None else linear(x, kernel_3, bias_3)]
    else:
        maps = (kernel, bias), (kernel_2, bias_2), (kernel_3, bias_3), (kernel_4, bias_4)
        outputs = [linear(x, *weights) for weights in maps if weights[0] is not None]
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
