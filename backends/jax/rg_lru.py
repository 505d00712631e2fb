"""The real-gated linear recurrent unit.  De et al. 2024, arXiv:2402.19427, section 2.4.

r_t = sigmoid(gate_a_t)        i_t = sigmoid(gate_x_t)
log a_t = -8 softplus(-a_logit) r_t
h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t
"""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._scan import gradient, scan, shift
from keras_recurrent.backends.jax._tokens import (
    STARTS,
    accumulate,
    drop_padding,
    effective_decay,
    first_state,
    where_going_on,
)

C = 8.0
MAX_SQRT_GRADIENT = 1000.0  # as DeepMind's released code bounds the root's derivative where a_t = 1


def unsupported(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None):
    return None


@jax.jit
def rg_lru(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None):
    """x, gate_a, gate_x: [B, T, D]; a_logit: [D].

    Returns ([B, T, D] in x's dtype, [B, D] in float32).
    """
    dtype = accumulate(x, gate_a, gate_x, a_logit)
    initial_state = first_state(initial_state, (x.shape[0], x.shape[2]), dtype)
    return _rg_lru(x, gate_a, gate_x, a_logit, initial_state, token_kind)


@jax.custom_vjp
def _rg_lru(x, gate_a, gate_x, a_logit, initial_state, token_kind):
    u, _, i, log_a, _ = _gates(x, gate_a, gate_x, a_logit, token_kind, initial_state.dtype)
    a = effective_decay(token_kind, jnp.exp(log_a))
    h = scan(a, _multiplier(log_a, token_kind) * i * u, initial_state)
    return h.astype(x.dtype), h[:, -1]


def _forward(x, gate_a, gate_x, a_logit, initial_state, token_kind):
    arguments = (x, gate_a, gate_x, a_logit, initial_state, token_kind)
    output, final_state = _rg_lru(*arguments)
    return (output, final_state), (*arguments, output)


def _backward(saved, d_outputs):
    x, gate_a, gate_x, a_logit, initial_state, token_kind, output = saved
    dtype = initial_state.dtype
    d_output, d_final = d_outputs
    u, r, i, log_a, (one_minus_r, one_minus_i) = _gates(
        x, gate_a, gate_x, a_logit, token_kind, dtype
    )
    a = effective_decay(token_kind, jnp.exp(log_a))
    multiplier = _multiplier(log_a, token_kind)
    g, d_initial = gradient(a, d_output.astype(dtype), d_final)

    d_x, d_gate_x = drop_padding(
        token_kind, g * multiplier * i, g * multiplier * u * i * one_minus_i
    )
    d_sqrt = jax.lax.rsqrt(jnp.maximum(-4 * jnp.expm1(2 * log_a), 1 / MAX_SQRT_GRADIENT**2))
    d_log_a = where_going_on(
        token_kind,
        g * a * shift(output.astype(dtype), initial_state) - g * i * u * d_sqrt * 2 * a * a,
    )
    d_gate_a = d_log_a * log_a * one_minus_r
    d_a_logit = jnp.sum(d_log_a * r, axis=(0, 1)) * C * jax.nn.sigmoid(-a_logit.astype(dtype))
    d_x, d_gate_a, d_gate_x = jax.lax.optimization_barrier(
        (d_x.astype(x.dtype), d_gate_a.astype(gate_a.dtype), d_gate_x.astype(gate_x.dtype))
    )
    return d_x, d_gate_a, d_gate_x, d_a_logit.astype(a_logit.dtype), d_initial, None


_rg_lru.defvjp(_forward, _backward)


def _gates(x, gate_a, gate_x, a_logit, token_kind, dtype):
    x, gate_a, gate_x = jax.lax.optimization_barrier((x, gate_a, gate_x))
    u, gate_a, gate_x = drop_padding(
        token_kind, x.astype(dtype), gate_a.astype(dtype), gate_x.astype(dtype)
    )
    r, i = jax.nn.sigmoid(gate_a), jax.nn.sigmoid(gate_x)
    log_a = -C * jax.nn.softplus(-a_logit.astype(dtype)) * r
    # Not 1 - r: that loses the digits of a gate that is nearly open.
    return u, r, i, log_a, (jax.nn.sigmoid(-gate_a), jax.nn.sigmoid(-gate_x))


def _multiplier(log_a, token_kind):
    """sqrt(1 - a^2), and 1 at a start."""
    multiplier = jnp.sqrt(-jnp.expm1(2 * log_a))
    if token_kind is None:
        return multiplier
    return jnp.where((token_kind == STARTS)[:, :, None], 1, multiplier)
