"""y = activation(gate) * x.  Shazeer 2020, arXiv:2002.05202."""

import functools

import jax

from keras_recurrent.backends.jax._tokens import accumulate


def unsupported(gate, x, activation="silu"):
    return None


@functools.partial(jax.jit, static_argnames="activation")
def gated_linear_unit(gate, x, activation="silu"):
    """gate, x: the same shape; activation: "silu" or "gelu". Returns that shape in x's dtype."""
    dtype = accumulate(gate, x)
    gate = gate.astype(dtype)
    gate = jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return (gate * x.astype(dtype)).astype(x.dtype)
