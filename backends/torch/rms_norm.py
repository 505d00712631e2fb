"""y = x r * scale, r = 1 / sqrt(mean(x²) + ε).  Zhang and Sennrich 2019, arXiv:1910.07467.

The gradients are

    dx = r (dy scale - x r mean(dy scale x r)),  dscale = Σ dy x r

since torch's own derivative of r has r³, which overflows float32. An autograd function rather than
a custom operator, so that `torch.compile` fuses it with adjacent operators.
"""

import torch

from ..constants import SMALLEST_SCALED_EPSILON, SQUARES_SCALE
from ._autograd import apply_function, cast_output, compile_only_in_graphs
from ._common import accumulation_dtype, forward_mode_active


def rms_norm(x, scale=None, epsilon=0.0):
    """x: [..., D]; scale: [D] or None. Returns [..., D] in x's dtype."""
    if forward_mode_active():
        return _forward(x, scale, epsilon)
    return apply_function(_RMSNorm, x, scale, epsilon)


def _forward(x, scale, epsilon):
    y, _ = _normalized(x, scale, epsilon)
    return cast_output(y if scale is None else y * scale.to(y.dtype), x.dtype)


class _RMSNorm(torch.autograd.Function):
    generate_vmap_rule = True

    forward = staticmethod(_forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, scale, ctx.epsilon = inputs
        ctx.save_for_backward(x, scale)

    @staticmethod
    @compile_only_in_graphs
    def backward(ctx, d_output):
        x, scale = ctx.saved_tensors
        y, r = _normalized(x, scale, ctx.epsilon)
        d_y, d_scale = d_output.to(y.dtype), None
        if scale is not None:
            d_scale = (d_y * y).reshape(-1, y.shape[-1]).sum(0).to(scale.dtype)
            d_y = d_y * scale.to(y.dtype)
        d_x = r * (d_y - y * (y * d_y).mean(-1, keepdim=True))
        return d_x.to(x.dtype), d_scale, None


def _normalized(x, scale, epsilon):
    """x r and r; r is 0 where the mean square is 0 or out of the range of the dtype."""
    x = x.to(accumulation_dtype(x, scale))
    z = _mean_square(x, SQUARES_SCALE)
    if epsilon < SMALLEST_SCALED_EPSILON:
        z = torch.where(z > 1, z, _mean_square(x, 1 / SQUARES_SCALE))
    z = z + epsilon
    r = z.rsqrt().masked_fill(z == 0, 0)
    return x * r, r


def _mean_square(x, scale):
    return (x * scale).mul_(x).mean(-1, keepdim=True) / scale
