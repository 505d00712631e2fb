"""y = RMSNorm(x) W + b for up to three matrices, then a gate or a residual; in float32."""

import functools

import jax
import jax.numpy as jnp

from ._common import accumulation_dtype
from .gated_linear_unit import gated_linear_unit
from .rms_norm import rms_norm


@functools.partial(jax.jit, static_argnames=("epsilon", "gate"))
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
    y = x.astype(dtype)
    if epsilon is not None:
        y = rms_norm(y, scale, epsilon)

    def linear(x, weight, offset):
        y = jnp.matmul(x, weight.astype(dtype), precision="highest")
        return y if offset is None else y + offset.astype(dtype)

    if gate is not None:
        y = gated_linear_unit(linear(y, kernel, bias), linear(y, kernel_2, bias_2), gate)
        outputs = [y if kernel_3 is None else linear(y, kernel_3, bias_3)]
    else:
        maps = (kernel, bias), (kernel_2, bias_2), (kernel_3, bias_3)
        outputs = [linear(y, *weights) for weights in maps if weights[0] is not None]
    if residual is not None:
        outputs[0] = outputs[0] + residual.astype(dtype)
    return tuple(output.astype(x.dtype) for output in outputs)
