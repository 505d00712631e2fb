"""log f = log(β + (1 - β) σ(logits)).  Qin et al. 2023, arXiv:2311.04823, §3.2."""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._tokens import accumulate


@jax.jit
def log_forget_gate(logits, lower_bound=None):
    """logits: [..., D]; lower_bound: [2, D], log β and log(1 - β), or None, β = 0.

    Returns [..., D] in float32, or float64 if an argument is float64.
    """
    dtype = accumulate(logits, lower_bound)
    log_f = jax.nn.log_sigmoid(logits.astype(dtype))
    if lower_bound is None:
        return log_f
    log_bound, log_rest = lower_bound.astype(dtype)
    return _log_of_sum(log_bound, log_rest + log_f)


@jax.custom_jvp
def _log_of_sum(a, b):
    """log(exp(a) + exp(b)), which is not above 0."""
    return jnp.minimum(jnp.logaddexp(a, b), 0)


@_log_of_sum.defjvp
def _(primals, tangents):
    # Not exp(a - log f), whose exponent is rounded, nor 0 where rounding had to be undone.
    (a, b), (d_a, d_b) = primals, tangents
    return _log_of_sum(a, b), jax.nn.sigmoid(a - b) * d_a + jax.nn.sigmoid(b - a) * d_b
