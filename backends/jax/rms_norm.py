"""y = x / sqrt(mean(x²) + ε) * scale.  Zhang and Sennrich 2019, arXiv:1910.07467."""

import functools

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._common import accumulation_dtype


@functools.partial(jax.jit, static_argnames="epsilon")
def rms_norm(x, scale=None, epsilon=0.0):
    """x: [..., D]; scale: [D] or None. Returns [..., D] in x's dtype."""
    dtype = accumulation_dtype(x, scale)
    y = x.astype(dtype)
    y = y * _rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return (y if scale is None else y * scale.astype(dtype)).astype(x.dtype)


@jax.custom_jvp
def _rsqrt(z):
    """1 / sqrt(z): XLA's approximation, which it also uses for the quotient, and a Newton step."""
    r = jax.lax.rsqrt(z)
    return r + r * (0.5 - 0.5 * z * r * r)


_rsqrt.defjvps(lambda d_z, r, z: d_z * (-0.5 * r * r * r))
