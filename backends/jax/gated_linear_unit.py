"""y = activation(gate) * x.  Shazeer 2020, arXiv:2002.05202."""

import functools
import math

import jax
import jax.numpy as jnp

from ..constants import GELU_CLIP
from ._common import accumulation_dtype

# gelu(z) = z σ(u), u = LINEAR z + CUBIC z³
LINEAR = math.sqrt(8 / math.pi)
CUBIC = 0.044715 * LINEAR


@functools.partial(jax.jit, static_argnames="activation")
def gated_linear_unit(gate, x, activation="silu"):
    """gate, x: [..., D]; activation: "silu" or "gelu". Returns [..., D] in x's dtype."""
    dtype = accumulation_dtype(gate, x)
    z = gate.astype(dtype)
    # Not z (1 + tanh(u / 2)) / 2, which loses the digits of a nearly closed gate.
    s = _sigmoid(z) if activation == "silu" else _gelu_sigmoid(z)
    return (z * s * x.astype(dtype)).astype(x.dtype)


@jax.custom_jvp
def _sigmoid(z):
    return jax.nn.sigmoid(z)


# JAX would compute σ(-z) as 1 - σ(z), which loses the digits of a nearly open gate.
_sigmoid.defjvps(lambda d_z, s, z: d_z * s * jax.nn.sigmoid(-z))


# One function with its own derivative: on CPUs, XLA splits a fused loop of more than one operation
# per byte among threads, which takes longer than the loop itself in short sequences. The gradient
# of a bound on z has many operations.
@jax.custom_jvp
def _gelu_sigmoid(z):
    return jax.nn.sigmoid(z * (LINEAR + CUBIC * (z * z)))


def _gelu_sigmoid_derivative(d_z, s, z):
    z = jnp.clip(z, -GELU_CLIP, GELU_CLIP)  # z * z may overflow, and σ(-u) be 0
    square = z * z
    u, slope = z * (LINEAR + CUBIC * square), LINEAR + 3 * CUBIC * square
    return d_z * s * jax.nn.sigmoid(-u) * slope


_gelu_sigmoid.defjvps(_gelu_sigmoid_derivative)
