"""h_t = exp(log_a_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, section 2.4."""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._gradient import with_gradient
from keras_recurrent.backends.jax._scan import gradient, scan, shift
from keras_recurrent.backends.jax._time_chunks import before, over_chunks
from keras_recurrent.backends.jax._tokens import (
    accumulate,
    drop_padding,
    effective_decay,
    first_state,
    where_going_on,
)


def forward(x, log_a, initial_state, token_kind):
    dtype = initial_state.dtype

    def step(state, start, x, log_a, token_kind):
        (u,) = drop_padding(token_kind, x.astype(dtype))
        h = scan(_decay(log_a, token_kind, dtype), u, state)
        return h[:, -1], (h.astype(x.dtype),)

    final_state, (output,) = over_chunks(step, initial_state, (x, log_a, token_kind))
    return output, final_state


def backward(_, log_a, initial_state, token_kind, output, d_output, d_final):
    dtype = initial_state.dtype

    def step(d_state, start, d_y, log_a, token_kind, h):
        a = _decay(log_a, token_kind, dtype)
        g, d_state = gradient(a, d_y.astype(dtype), d_state)
        state = before(output, start, initial_state[:, None])[:, 0]
        d_log_a = where_going_on(token_kind, g * a * shift(h.astype(dtype), state))
        (d_x,) = drop_padding(token_kind, g)
        return d_state, (d_x.astype(output.dtype), d_log_a.astype(log_a.dtype))

    tensors = (d_output, log_a, token_kind, output)
    d_initial, (d_x, d_log_a) = over_chunks(step, d_final, tensors, reverse=True)
    return d_x, d_log_a, d_initial, None


def operation(forward, backward):
    """The operation made of two functions: those of this file, or others with their arguments."""
    run = with_gradient(forward, backward, without=(0,))

    @jax.jit
    def linear_scan(x, log_a, initial_state=None, token_kind=None):
        """x, log_a: [B, T, D]. Returns ([B, T, D] in x's dtype, [B, D] in float32)."""
        dtype = accumulate(x, log_a)
        initial_state = first_state(initial_state, (x.shape[0], x.shape[2]), dtype)
        return run(x, log_a, initial_state, token_kind)

    return linear_scan


linear_scan = operation(forward, backward)


def _decay(log_a, token_kind, dtype):
    return effective_decay(token_kind, jnp.exp(log_a.astype(dtype)))
