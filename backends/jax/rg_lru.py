"""The real-gated linear recurrent unit.  De et al. 2024, arXiv:2402.19427, section 2.4.

r_t = sigmoid(gate_a_t)        i_t = sigmoid(gate_x_t)
log a_t = -8 softplus(-a_logit) r_t
h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t
"""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._gradient import with_gradient
from keras_recurrent.backends.jax._scan import gradient, scan, shift
from keras_recurrent.backends.jax._time_chunks import before, over_chunks
from keras_recurrent.backends.jax._tokens import (
    STARTS,
    accumulate,
    drop_padding,
    effective_decay,
    first_state,
    sum_over_tokens,
    where_going_on,
)

C = 8.0
MAX_SQRT_GRADIENT = 1000.0  # as DeepMind's released code bounds the root's derivative where a_t = 1


def forward(x, gate_a, gate_x, a_logit, initial_state, token_kind):
    dtype = initial_state.dtype

    def step(state, start, x, gate_a, gate_x, token_kind):
        u, _, i, log_a, _ = _gates(x, gate_a, gate_x, a_logit, token_kind, dtype)
        a = effective_decay(token_kind, jnp.exp(log_a))
        h = scan(a, _multiplier(log_a, token_kind) * i * u, state)
        return h[:, -1], (h.astype(x.dtype),)

    final_state, (output,) = over_chunks(step, initial_state, (x, gate_a, gate_x, token_kind))
    return output, final_state


def backward(x, gate_a, gate_x, a_logit, initial_state, token_kind, output, d_output, d_final):
    dtype = initial_state.dtype

    def step(carry, start, x, gate_a, gate_x, token_kind, h, d_y):
        d_state, d_rate = carry
        u, r, i, log_a, (one_minus_r, one_minus_i) = _gates(
            x, gate_a, gate_x, a_logit, token_kind, dtype
        )
        a = effective_decay(token_kind, jnp.exp(log_a))
        multiplier = _multiplier(log_a, token_kind)
        g, d_state = gradient(a, d_y.astype(dtype), d_state)

        d_x, d_gate_x = drop_padding(
            token_kind, g * multiplier * i, g * multiplier * u * i * one_minus_i
        )
        d_sqrt = jax.lax.rsqrt(jnp.maximum(-4 * jnp.expm1(2 * log_a), 1 / MAX_SQRT_GRADIENT**2))
        state = before(output, start, initial_state[:, None])[:, 0]
        d_log_a = where_going_on(
            token_kind,
            g * a * shift(h.astype(dtype), state) - g * i * u * d_sqrt * 2 * a * a,
        )
        d_rate = d_rate + sum_over_tokens(d_log_a * r)
        d_gate_a = d_log_a * log_a * one_minus_r
        return (d_state, d_rate), (
            d_x.astype(x.dtype),
            d_gate_a.astype(gate_a.dtype),
            d_gate_x.astype(gate_x.dtype),
        )

    carry = d_final, jnp.zeros(a_logit.shape, dtype)
    tensors = (x, gate_a, gate_x, token_kind, output, d_output)
    (d_initial, d_rate), d_tensors = over_chunks(step, carry, tensors, reverse=True)
    d_a_logit = d_rate * C * jax.nn.sigmoid(-a_logit.astype(dtype))
    return *d_tensors, d_a_logit.astype(a_logit.dtype), d_initial, None


def operation(forward, backward):
    """The operation made of two functions: those of this file, or others with their arguments."""
    run = with_gradient(forward, backward)

    @jax.jit
    def rg_lru(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None):
        """x, gate_a, gate_x: [B, T, D]; a_logit: [D].

        Returns ([B, T, D] in x's dtype, [B, D] in float32).
        """
        dtype = accumulate(x, gate_a, gate_x, a_logit)
        initial_state = first_state(initial_state, (x.shape[0], x.shape[2]), dtype)
        return run(x, gate_a, gate_x, a_logit, initial_state, token_kind)

    return rg_lru


rg_lru = operation(forward, backward)


def _gates(x, gate_a, gate_x, a_logit, token_kind, dtype):
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
