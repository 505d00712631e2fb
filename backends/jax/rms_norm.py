"""y = x / sqrt(mean(x²) + ε) * scale.  Zhang and Sennrich 2019, arXiv:1910.07467."""

import functools

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._tokens import accumulate


def unsupported(x, scale=None, epsilon=0.0):
    return None


@functools.partial(jax.jit, static_argnames="epsilon")
def rms_norm(x, scale=None, epsilon=0.0):
    """x: [..., D]; scale: [D] or None. Returns [..., D] in x's dtype."""
    dtype = accumulate(x, scale)
    y = x.astype(dtype)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return (y if scale is None else y * scale.astype(dtype)).astype(x.dtype)
