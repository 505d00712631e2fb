"""y = activation(gate) * x.  Shazeer 2020, arXiv:2002.05202."""

import functools
import math

import jax
import jax.numpy as jnp

from ..constants import GELU_CLIP
from ._common import accumulation_dtype


@functools.partial(jax.jit, static_argnames="activation")
def gated_linear_unit(gate, x, activation="silu"):
    """gate, x: [..., D]; activation: "silu" or "gelu". Returns [..., D] in x's dtype."""
    dtype = accumulation_dtype(gate, x)
    gate = z = gate.astype(dtype)
    if activation == "gelu":
        # z σ(2 u), not z (1 + tanh(u)) / 2, which loses the digits of a nearly closed gate.
        z = jnp.clip(gate, -GELU_CLIP, GELU_CLIP)
        z = math.sqrt(8 / math.pi) * (z + 0.044715 * z**3)
    return (gate * _sigmoid(z) * x.astype(dtype)).astype(x.dtype)


@jax.custom_jvp
def _sigmoid(z):
    return jax.nn.sigmoid(z)


# JAX would compute σ(-z) as 1 - σ(z), which loses the digits of a nearly open gate.
_sigmoid.defjvps(lambda d_z, s, z: d_z * s * jax.nn.sigmoid(-z))
