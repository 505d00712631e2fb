"""y = x / sqrt(mean(x²) + ε) * scale.  Zhang and Sennrich 2019, arXiv:1910.07467."""

import functools

import jax
import jax.numpy as jnp

from ..constants import SMALLEST_SCALED_EPSILON, SQUARES_SCALE
from ._common import accumulation_dtype


@functools.partial(jax.jit, static_argnames="epsilon")
def rms_norm(x, scale=None, epsilon=0.0):
    """x: [..., D]; scale: [D] or None. Returns [..., D] in x's dtype."""
    dtype = accumulation_dtype(x, scale)
    y = _normalized(x.astype(dtype), epsilon)
    return (y if scale is None else y * scale.astype(dtype)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _normalized(x, epsilon):
    """x r, r = 1 / sqrt(mean(x²) + ε)."""
    return x * _reciprocal_root(x, epsilon)


@_normalized.defjvp
def _(epsilon, arguments, tangents):
    """dy = r (dx - y mean(y dx)): JAX's own derivative of r has r³, which overflows float32."""
    (x,), (d_x,) = arguments, tangents
    r = _reciprocal_root(x, epsilon)
    y, d_y = x * r, d_x * r
    return y, d_y - y * jnp.mean(y * d_y, axis=-1, keepdims=True)


def _reciprocal_root(x, epsilon):
    """r from XLA's approximation, which XLA also uses for the quotient, and a Newton step.

    0 where the mean square is 0 or out of the range of the dtype. Half of z might underflow.
    """
    z = _mean_square(x, SQUARES_SCALE)
    if epsilon < SMALLEST_SCALED_EPSILON:
        z = jnp.where(z > 1, z, _mean_square(x, 1 / SQUARES_SCALE))
    z = z + epsilon
    r = jax.lax.rsqrt(z)
    return jnp.where((z == 0) | (z == jnp.inf), 0, r + r * (0.5 - (z * r) * (0.5 * r)))


def _mean_square(x, scale):
    # Not the square of a product with a constant: XLA would multiply by the square of the constant.
    return jnp.mean(x * (x * scale), axis=-1, keepdims=True) / scale
