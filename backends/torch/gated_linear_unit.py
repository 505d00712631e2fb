"""y = activation(gate) * x, activation(z) = z σ(u).  Shazeer 2020, arXiv:2002.05202.

For silu u = z; for gelu, approximated by a tanh, u = sqrt(8 / π) (z + 0.044715 z³). Backward:

    dx = dy z σ(u),  dgate = dy x (σ(u) + z u' σ(u) σ(-u))

torch's own derivatives lose digits (`slope_of_gated`). An autograd function rather than a custom
operator, so that `torch.compile` fuses it with adjacent operators.
"""

import math

import torch
from torch.nn import functional as F

from ..constants import GELU_CLIP
from ._autograd import apply_function, cast_output, compile_only_in_graphs
from ._common import accumulation_dtype, elements_per_launch, forward_mode_active, slope_of_gated
from ._sharding import is_sharded

_SQRT_8_OVER_PI = math.sqrt(8 / math.pi)


def gated_linear_unit(gate, x, activation="silu"):
    """gate, x: [..., D]; activation: "silu" or "gelu". Returns [..., D] in x's dtype."""
    if forward_mode_active():
        return _forward(gate, x, activation)
    return apply_function(_GatedLinearUnit, gate, x, activation)


def _forward(gate, x, activation):
    dtype = accumulation_dtype(gate, x)
    z = gate.to(dtype)
    # Not torch's own gelu, z (1 + tanh(u / 2)) / 2: it loses the digits of a nearly closed gate.
    value = F.silu(z) if activation == "silu" else z * torch.sigmoid(_add_cube(1, *_terms(z)))
    return cast_output(value * x.to(dtype), x.dtype)


class _GatedLinearUnit(torch.autograd.Function):
    generate_vmap_rule = True

    forward = staticmethod(_forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        gate, x, ctx.activation = inputs
        ctx.save_for_backward(gate, x)

    @staticmethod
    @compile_only_in_graphs
    def backward(ctx, d_output):
        gate, x = ctx.saved_tensors
        # With a gradient of this gradient, or tensors on several devices.
        if torch.is_grad_enabled() or is_sharded(x):
            value, slope = _activated(ctx.activation, gate.to(accumulation_dtype(gate, x)))
            d_gate, d_x = slope * x * d_output, value * d_output
            return d_gate.to(gate.dtype), d_x.to(x.dtype), None
        d_gate, d_x = gate.new_empty(gate.shape), x.new_empty(x.shape)
        tensors = gate, x, d_output, d_gate, d_x
        size = elements_per_launch(x)
        if torch.compiler.is_compiling() or x.numel() <= size:
            _write_gradients(ctx.activation, *tensors)
            return d_gate, d_x, None
        # Block by block, so that temporaries stay in the cache.
        for block in zip(*(t.reshape(-1).split(size) for t in tensors), strict=True):
            _write_gradients(ctx.activation, *block)
        return d_gate, d_x, None


def _write_gradients(activation, gate, x, d_output, d_gate, d_x):
    value, slope = _activated(activation, gate.to(accumulation_dtype(gate, x)))
    torch.mul(value, d_output, out=d_x)
    torch.mul(slope.mul_(x), d_output, out=d_gate)


def _activated(activation, z):
    """activation(z) = z σ(u) and its derivative."""
    u, z_du = z, z
    if activation == "gelu":
        terms = _terms(z)
        u, z_du = _add_cube(1, *terms), _add_cube(3, *terms)
    s = torch.sigmoid(u)
    return z * s, slope_of_gated(s, u, z_du)


def _terms(z):
    """The terms of u of gelu(z) = z σ(u), of which `_add_cube` makes u, and z u' with factor 3."""
    bounded = z.clamp(-GELU_CLIP, GELU_CLIP)
    scaled = bounded * _SQRT_8_OVER_PI
    return scaled, scaled * bounded * bounded


def _add_cube(factor, scaled, cube):
    return torch.add(scaled, cube, alpha=factor * 0.044715)
