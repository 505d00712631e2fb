"""h_t = exp(log_a_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, section 2.4."""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._scan import gradient, scan, shift
from keras_recurrent.backends.jax._tokens import (
    accumulate,
    drop_padding,
    effective_decay,
    first_state,
    where_going_on,
)


def unsupported(x, log_a, initial_state=None, token_kind=None):
    return None


@jax.jit
def linear_scan(x, log_a, initial_state=None, token_kind=None):
    """x, log_a: [B, T, D]. Returns ([B, T, D] in x's dtype, [B, D] in float32)."""
    dtype = accumulate(x, log_a)
    initial_state = first_state(initial_state, (x.shape[0], x.shape[2]), dtype)
    return _linear_scan(x, log_a, initial_state, token_kind)


@jax.custom_vjp
def _linear_scan(x, log_a, initial_state, token_kind):
    (u,) = drop_padding(token_kind, x.astype(initial_state.dtype))
    h = scan(_decay(log_a, token_kind, initial_state.dtype), u, initial_state)
    return h.astype(x.dtype), h[:, -1]


def _forward(x, log_a, initial_state, token_kind):
    output, final_state = _linear_scan(x, log_a, initial_state, token_kind)
    return (output, final_state), (log_a, initial_state, token_kind, output)


def _backward(saved, d_outputs):
    log_a, initial_state, token_kind, output = saved
    dtype = initial_state.dtype
    d_output, d_final = d_outputs
    a = _decay(log_a, token_kind, dtype)
    g, d_initial = gradient(a, d_output.astype(dtype), d_final)
    d_log_a = where_going_on(token_kind, g * a * shift(output.astype(dtype), initial_state))
    (d_x,) = drop_padding(token_kind, g)
    return d_x.astype(output.dtype), d_log_a.astype(log_a.dtype), d_initial, None


_linear_scan.defvjp(_forward, _backward)


def _decay(log_a, token_kind, dtype):
    return effective_decay(token_kind, jnp.exp(log_a.astype(dtype)))
