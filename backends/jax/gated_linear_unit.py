"""y = activation(gate) * x.  Shazeer 2020, arXiv:2002.05202."""

import functools
import math

import jax
import jax.numpy as jnp

from ._common import accumulation_dtype, sigmoid

# gelu(z) = z σ(u), u = LINEAR z + CUBIC z³
LINEAR = math.sqrt(8 / math.pi)
CUBIC = 0.044715 * LINEAR
# Bound of |z| in the derivative of gelu, with which e^-u fits float32. Beyond it, the derivative
# is 1 or 0, up to 3e-36.
MAX_GELU_ARGUMENT = 10


@functools.partial(jax.jit, static_argnames="activation")
def gated_linear_unit(gate, x, activation="silu"):
    """gate, x: [..., D]; activation: "silu" or "gelu". Returns [..., D] in x's dtype."""
    dtype = accumulation_dtype(gate, x)
    z = gate.astype(dtype)
    activated = _gelu(z) if activation == "gelu" else z * sigmoid(z)
    return (activated * x.astype(dtype)).astype(x.dtype)


# Few operations, since XLA on CPUs splits a fused loop of more than one operation per byte among
# threads, which takes longer than the loop itself in short sequences.
@jax.custom_jvp
def _gelu(z):
    # Not z (1 + tanh(u / 2)) / 2, which loses the digits of a nearly closed gate.
    return z / (1 + jnp.exp(z * (-CUBIC * (z * z) - LINEAR)))


def _gelu_derivative(d_z, _, z):
    """d_z (σ(u) + z u' σ(u) σ(-u)), with σ(u) = 1 / (1 + e) and σ(-u) = e / (1 + e)."""
    z = jnp.clip(z, -MAX_GELU_ARGUMENT, MAX_GELU_ARGUMENT)
    square = z * z
    e, z_du = jnp.exp(z * (-CUBIC * square - LINEAR)), z * (3 * CUBIC * square + LINEAR)
    return d_z * ((1 + z_du * (e / (1 + e))) / (1 + e))


_gelu.defjvps(_gelu_derivative)
