"""The real-gated linear recurrent unit, with the equations of `backends/reference/rg_lru.py`."""

import jax
import jax.numpy as jnp

from ..constants import DECAY_EXPONENT, MAX_SQRT_GRADIENT
from ._common import (
    applied_decay,
    default_zero_state,
    default_zero_state_gradient,
    filled,
    kind_masks,
    sum_over_tokens,
)
from ._operation import kernel_over_time
from ._scan import adjoint_scan, previous, scan
from ._time_chunks import elements_before, scan_chunks


def state_shape(x, *_):
    return x.shape[0], x.shape[2]


@default_zero_state(state_shape)
def forward(x, gate_a, gate_x, a_logit, initial_state, token_kind):
    dtype = initial_state.dtype

    def step(state, start, x, gate_a, gate_x, token_kind):
        starts, padding = kind_masks(token_kind)
        u, gate_a, gate_x = (filled(t.astype(dtype), padding, 0) for t in (x, gate_a, gate_x))
        log_a, i = _log_decay(jax.nn.sigmoid(gate_a), a_logit), jax.nn.sigmoid(gate_x)
        a = applied_decay(jnp.exp(log_a), starts, padding)
        h = scan(a, _multiplier(log_a, starts) * i * u, state)
        return h[:, -1], (h.astype(x.dtype),)

    final_state, (output,) = scan_chunks(step, initial_state, (x, gate_a, gate_x, token_kind))
    return output, final_state


@default_zero_state_gradient
def backward(x, gate_a, gate_x, a_logit, initial_state, token_kind, output, d_output, d_final):
    dtype = initial_state.dtype
    # XLA on CPUs would compute the scan of forward a second time, for the state before each token.
    output = jax.lax.platform_dependent(
        output, cpu=jax.lax.optimization_barrier, default=lambda output: output
    )

    def step(carry, start, x, gate_a, gate_x, token_kind, h, dh):
        d_state, d_rate = carry
        starts, padding = kind_masks(token_kind)
        u, z_a, z_x = (filled(t.astype(dtype), padding, 0) for t in (x, gate_a, gate_x))
        r, i = jax.nn.sigmoid(z_a), jax.nn.sigmoid(z_x)
        log_a = _log_decay(r, a_logit)
        # Not 1 - r, which loses the digits of a nearly open gate.
        one_minus_r, one_minus_i = jax.nn.sigmoid(-z_a), jax.nn.sigmoid(-z_x)
        a = applied_decay(jnp.exp(log_a), starts, padding)
        multiplier = _multiplier(log_a, starts)
        g, d_state = adjoint_scan(a, dh.astype(dtype), d_state)

        d_x = filled(g * multiplier * i, padding, 0)
        d_gate_x = filled(g * multiplier * u * i * one_minus_i, padding, 0)
        d_sqrt = 1 / jnp.maximum(2 * multiplier, 1 / MAX_SQRT_GRADIENT)
        state = elements_before(output, start, initial_state[:, None])[:, 0]
        d_log_a = g * a * previous(h.astype(dtype), state) - g * i * u * d_sqrt * 2 * a * a
        d_log_a = filled(filled(d_log_a, starts, 0), padding, 0)
        d_rate = d_rate + sum_over_tokens(d_log_a * r)
        d_gate_a = d_log_a * log_a * one_minus_r
        return (d_state, d_rate), (
            d_x.astype(x.dtype),
            d_gate_a.astype(gate_a.dtype),
            d_gate_x.astype(gate_x.dtype),
        )

    carry = d_final, jnp.zeros(a_logit.shape, dtype)
    tensors = (x, gate_a, gate_x, token_kind, output, d_output)
    (d_initial, d_rate), d_tensors = scan_chunks(step, carry, tensors, reverse=True)
    d_a_logit = d_rate * DECAY_EXPONENT * jax.nn.sigmoid(-a_logit.astype(dtype))
    return *d_tensors, d_a_logit.astype(a_logit.dtype), d_initial, None


rg_lru = kernel_over_time("rg_lru", forward, backward)


def _log_decay(r, a_logit):
    """log a for the recurrence gate r."""
    return -DECAY_EXPONENT * jax.nn.softplus(-a_logit.astype(r.dtype)) * r


def _multiplier(log_a, starts):
    """sqrt(1 - a²), and 1 at a start."""
    return filled(jnp.sqrt(-jnp.expm1(2 * log_a)), starts, 1)
