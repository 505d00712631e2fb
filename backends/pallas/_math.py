"""Functions that Mosaic, the compiler of the kernels, lacks or computes inaccurately."""

import jax.numpy as jnp


def sigmoids(z):
    """σ(z) and σ(-z), each accurate to float32."""
    e = jnp.exp(-jnp.abs(z))
    larger = 1 / (1 + e)
    smaller = e * larger
    return jnp.where(z < 0, smaller, larger), jnp.where(z < 0, larger, smaller)


def decay(log_a):
    """a = exp(log_a) and 1 - a.

    Where a is near 1, the difference would cancel. There 1 - a is a power series in log_a, and a is
    computed from it: even a small bias of `exp` would accumulate over the many tokens that such a
    decay spans.
    """
    z = jnp.maximum(log_a, -0.35)
    series = z * (1 / 5040) + 1 / 720
    for factor in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1):
        series = series * z + factor
    difference, far = -z * series, jnp.exp(log_a)
    near_1 = log_a > -0.35
    return jnp.where(near_1, 1 - difference, far), jnp.where(near_1, difference, 1 - far)
