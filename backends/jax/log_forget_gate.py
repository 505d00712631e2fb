"""log f = log(β + (1 - β) σ(logits)).  Qin et al. 2023, arXiv:2311.04823, section 3.2."""

import jax
import jax.numpy as jnp

from ._common import accumulation_dtype
from ._operation import token_wise_kernel


def forward(logits, lower_bound):
    """Returns (log f,)."""
    dtype = accumulation_dtype(logits, lower_bound)
    logits = logits.astype(dtype)
    if lower_bound is None:
        return (_log_sigmoid(logits),)
    return (_bounded(logits, *lower_bound.astype(dtype)),)


def backward(logits, lower_bound, _, d_log_f):
    """Recomputes residuals from the logits: in float32 they would be twice the bfloat16 logits."""
    given = [x for x in (logits, lower_bound) if x is not None]
    _, pull_back = jax.vjp(lambda *given: forward(given[0], *given[1:] or [None])[0], *given)
    d_logits, *d_bound = pull_back(d_log_f)
    return d_logits, d_bound[0] if d_bound else None


@jax.custom_jvp
def _log_sigmoid(z):
    return jax.nn.log_sigmoid(z)


# JAX would compute σ(-z) as the exponential of a difference of two large numbers.
_log_sigmoid.defjvps(lambda d_z, _, z: d_z * jax.nn.sigmoid(-z))


@jax.custom_jvp
def _bounded(z, log_bound, log_rest):
    """log f, computed as log(1 - w) where w = (1 - β) σ(-z) <= 1/2."""
    log_sum = jnp.logaddexp(log_bound, log_rest + _log_sigmoid(z))
    forgotten = jnp.exp(log_rest) * jax.nn.sigmoid(-z)
    # log(1 - w): on a CPU, XLA's log1p loses digits of float64 for negative arguments only.
    near_1 = -jnp.log1p(forgotten / (1 - jnp.minimum(forgotten, 0.5)))
    is_near_1 = (forgotten <= 0.5) & ~jnp.isnan(log_sum)  # log β may be NaN
    return jnp.where(is_near_1, near_1, log_sum)


@_bounded.defjvp
def _(primals, tangents):
    # Not exp(log_bound - log f), whose exponent is rounded.
    z, log_bound, log_rest = primals
    d_z, d_bound, d_rest = tangents
    log_ratio = log_rest + _log_sigmoid(z) - log_bound  # of the gate's share of f and the bound's
    d_gate = d_rest + jax.nn.sigmoid(-z) * d_z
    tangent = jax.nn.sigmoid(log_ratio) * d_gate + jax.nn.sigmoid(-log_ratio) * d_bound
    return _bounded(*primals), tangent


log_forget_gate = token_wise_kernel("log_forget_gate", forward, backward)
