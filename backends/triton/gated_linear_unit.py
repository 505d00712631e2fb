"""y = activation(gate) * x, activation(z) = z σ(u).  Shazeer 2020, arXiv:2002.05202.

For silu u = z; for the tanh approximation of gelu, u = sqrt(8 / π) (z + 0.044715 z³). Backward:

    dx = dy z σ(u),  dgate = dy x σ(u) (1 + z u' σ(-u))
"""

import math

import triton
import triton.language as tl

from ._device.math import sigmoid
from ._runtime.framework import operation, run, token_wise_unsupported_reason
from ._runtime.launch import Launch, cdiv, like
from ._runtime.operation import Operation

_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
# A thread loads two vectors of 16 bytes from a 16-bit tensor.
_TILE = {"BLOCK": 2048, "num_warps": 4}


@triton.jit
def _sigmoids(z, GELU: tl.constexpr, FINE: tl.constexpr):
    """σ(u), σ(-u) and z u'. If σ rounds to 0 or 1, z u' is inexact but finite."""
    u, slope = z, z
    if GELU:
        z = tl.where(tl.abs(z) > 10.0, tl.where(z > 0.0, 10.0, -10.0), z)
        u = (z + 0.044715 * z * z * z) * _SQRT_8_OVER_PI
        slope = (z + 0.134145 * z * z * z) * _SQRT_8_OVER_PI
    s, not_s = sigmoid(u, FINE)
    return tl.where(u < -80.0, 0.0, s), not_s, slope


@triton.jit
def _locate_program(n, BLOCK: tl.constexpr):
    """The offset of this program's first element, relative offsets of all, and their mask."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    return start, offsets, offsets < n - start


@triton.jit
def _forward_kernel(gate, x, y, n, GELU: tl.constexpr, BLOCK: tl.constexpr):
    SHORT: tl.constexpr = gate.dtype.element_ty != tl.float32 and x.dtype.element_ty != tl.float32
    start, offsets, valid = _locate_program(n, BLOCK)
    z = tl.load(gate + start + offsets, valid, other=0.0).to(tl.float32)
    s, _, _ = _sigmoids(z, GELU, not SHORT)
    value = tl.load(x + start + offsets, valid, other=0.0).to(tl.float32)
    tl.store(y + start + offsets, z * s * value, valid)


@triton.jit
def _backward_kernel(dy, gate, x, d_gate, dx, n, GELU: tl.constexpr, BLOCK: tl.constexpr):
    SHORT: tl.constexpr = gate.dtype.element_ty != tl.float32 and x.dtype.element_ty != tl.float32
    start, offsets, valid = _locate_program(n, BLOCK)
    z = tl.load(gate + start + offsets, valid, other=0.0).to(tl.float32)
    s, not_s, slope = _sigmoids(z, GELU, not SHORT)
    d_output = tl.load(dy + start + offsets, valid, other=0.0).to(tl.float32)
    value = tl.load(x + start + offsets, valid, other=0.0).to(tl.float32)
    tl.store(d_gate + start + offsets, d_output * value * (s * (1.0 + slope * not_s)), valid)
    tl.store(dx + start + offsets, d_output * (z * s), valid)


def results(gate, x, *, activation: str):
    return (like(x),)


def forward(gate, x, *, activation: str):
    return _launch(_forward_kernel, (gate, x), (like(x),), activation)


def backward(gate, x, y, dy, *, activation: str):
    return _launch(_backward_kernel, (dy, gate, x), (like(gate), like(x)), activation)


def _launch(kernel, tensors, outputs, activation):
    n = math.prod(outputs[0].shape)
    programs = cdiv(n, _TILE["BLOCK"])
    options = {"GELU": activation == "gelu", **_TILE}
    return run(Launch(kernel, programs, tensors, outputs, (n,), options))


gated_linear_unit = operation(
    Operation(
        *("gated_linear_unit", forward, results, backward, token_wise_unsupported_reason),
        on_jax=False,
    )
)
