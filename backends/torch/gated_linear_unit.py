"""y = activation(gate) * x, activation(z) = z σ(u).  Shazeer 2020, arXiv:2002.05202.

For silu u = z; for gelu, approximated by a tanh, u = sqrt(8 / π) (z + 0.044715 z³). Backward:

    dx = dy z σ(u),  dgate = dy x (σ(u) + z u' σ(u) σ(-u))

torch's own derivatives take 1 - σ(u) for σ(-u), which loses the digits of a gate that is nearly
open. A function of autograd rather than an operator of its own: `torch.compile` joins it with what
stands beside it.
"""

import math

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from keras_recurrent.backends.torch._common import accumulation_dtype, elements_per_launch

_SQRT_8_OVER_PI = math.sqrt(8 / math.pi)


def gated_linear_unit(gate, x, activation="silu"):
    """gate, x: of one shape; activation: "silu" or "gelu". Returns that shape in x's dtype."""
    return _GatedLinearUnit.apply(gate, x, activation)


class _GatedLinearUnit(torch.autograd.Function):
    @staticmethod
    def forward(gate, x, activation):
        dtype = accumulation_dtype(gate, x)
        gate = gate.to(dtype)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return (gate * x.to(dtype)).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        gate, x, ctx.activation = inputs
        ctx.save_for_backward(gate, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output):
        gate, x = ctx.saved_tensors
        d_gate, d_x = gate.new_empty(gate.shape), x.new_empty(x.shape)
        # Block by block: the temporaries stay in the cache. The compiler needs no such help.
        size = x.numel() if torch.compiler.is_compiling() else elements_per_launch(x)
        blocks = (t.reshape(-1).split(size) for t in (gate, x, d_output, d_gate, d_x))
        for block in zip(*blocks, strict=True):
            _write_gradients(ctx.activation, *block)
        return d_gate, d_x, None


def _write_gradients(activation, gate, x, d_output, d_gate, d_x):
    z = gate.to(accumulation_dtype(gate, x))
    u = slope = z  # slope: z u'
    if activation == "gelu":
        scaled, square = z * _SQRT_8_OVER_PI, z * z
        u = torch.addcmul(scaled, scaled, square, value=0.044715)
        slope = square.mul_(scaled).mul_(3 * 0.044715).add_(scaled)
    s, not_s = torch.sigmoid(u), torch.neg(u).sigmoid_()
    torch.mul(z * s, d_output, out=d_x)
    torch.mul(not_s.mul_(slope).mul_(s).add_(s).mul_(x), d_output, out=d_gate)
