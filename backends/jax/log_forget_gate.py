"""log f = log(β + (1 - β) σ(logits)).  Qin et al. 2023, arXiv:2311.04823, section 3.2."""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._common import accumulation_dtype


@jax.jit
def log_forget_gate(logits, lower_bound=None):
    """logits: [..., D]; lower_bound: [2, D], log β and log(1 - β), or None, β = 0.

    Returns [..., D] in float32, or float64 if an argument is float64.
    """
    dtype = accumulation_dtype(logits, lower_bound)
    log_f = _log_sigmoid(logits.astype(dtype))
    if lower_bound is None:
        return log_f
    log_bound, log_rest = lower_bound.astype(dtype)
    return _log_of_sum(log_bound, log_rest + log_f)


@jax.custom_jvp
def _log_sigmoid(z):
    return jax.nn.log_sigmoid(z)


# JAX would take the exponential of a difference of two large numbers for σ(-z).
_log_sigmoid.defjvps(lambda d_z, _, z: d_z * jax.nn.sigmoid(-z))


@jax.custom_jvp
def _log_of_sum(a, b):
    """log(exp(a) + exp(b)), cut off at 0: rounding may take it above."""
    return jnp.minimum(jnp.logaddexp(a, b), 0)


@_log_of_sum.defjvp
def _(primals, tangents):
    # Not exp(a - log f), whose exponent is rounded; and not 0 where the sum was cut off.
    (a, b), (d_a, d_b) = primals, tangents
    return _log_of_sum(a, b), jax.nn.sigmoid(a - b) * d_a + jax.nn.sigmoid(b - a) * d_b
