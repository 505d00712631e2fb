"""`linear_crossentropy` on JAX: plain JAX's loop, with a kernel for each chunk of logits."""

import jax.numpy as jnp

from ...jax import _shards
from ...jax.linear_crossentropy import linear_crossentropy as plain
from .._runtime import jax_functions
from .._runtime.launch import Array, Launch
from .crossentropy_kernel import chunk_kernel, options, output_arrays

unsupported_reason = jax_functions.unsupported_reason


def chunk_losses(z, weights, tokens, soft_cap, dtype, with_gradients):
    """The kernel's version of `_plain_chunk_losses` in `backends/jax/linear_crossentropy.py`."""
    dtype = jnp.dtype(dtype)

    def kernel(z, weights, tokens):
        rows, vocabulary = tokens.size, z.shape[-1]
        inputs = z.reshape(rows, vocabulary), tokens.reshape(rows), weights.reshape(rows)
        d_z = Array((rows, vocabulary), dtype.name) if with_gradients else None
        constants = options(vocabulary, soft_cap is not None, dtype == jnp.float32)
        outputs, numbers = (d_z, *output_arrays(rows)), (float(soft_cap or 0),)
        d_z, losses, factors, best = jax_functions.run(
            Launch(chunk_kernel, rows, inputs, outputs, numbers, constants)
        )
        arrays = [losses, best, d_z, factors] if with_gradients else [losses, best]
        return tuple(f.reshape(*tokens.shape, *f.shape[1:]) for f in arrays)

    results = ("B T", "B T", "B T V", "B T") if with_gradients else ("B T", "B T")
    arguments = "B T V", "B T", "B T"
    return _shards.distributed(kernel, arguments, results, channels=())(z, weights, tokens)


linear_crossentropy = plain.replace_passes(chunk_losses)
