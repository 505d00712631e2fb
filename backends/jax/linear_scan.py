"""h_t = exp(log_a_t) * h_{t-1} + x_t, with the gradients of `backends/reference/linear_scan.py`."""

import jax.numpy as jnp

from ._common import (
    applied_decay,
    default_zero_state,
    default_zero_state_gradient,
    filled,
    kind_masks,
)
from ._operation import kernel_over_time
from ._scan import adjoint_scan, previous, scan
from ._time_chunks import elements_before, scan_chunks


def state_shape(x, log_a):
    return x.shape[0], x.shape[2]


@default_zero_state(state_shape)
def forward(x, log_a, initial_state, token_kind):
    dtype = initial_state.dtype

    def step(state, start, x, log_a, token_kind):
        starts, padding = kind_masks(token_kind)
        a = applied_decay(jnp.exp(log_a.astype(dtype)), starts, padding)
        h = scan(a, filled(x.astype(dtype), padding, 0), state)
        return h[:, -1], (h.astype(x.dtype),)

    final_state, (output,) = scan_chunks(step, initial_state, (x, log_a, token_kind))
    return output, final_state


@default_zero_state_gradient
def backward(_, log_a, initial_state, token_kind, output, d_output, d_final):
    dtype = initial_state.dtype

    def step(d_state, start, dh, log_a, token_kind, h):
        starts, padding = kind_masks(token_kind)
        a = applied_decay(jnp.exp(log_a.astype(dtype)), starts, padding)
        g, d_state = adjoint_scan(a, dh.astype(dtype), d_state)
        state = elements_before(output, start, initial_state[:, None])[:, 0]
        d_log_a = g * a * previous(h.astype(dtype), state)
        d_log_a = filled(filled(d_log_a, starts, 0), padding, 0)
        d_x = filled(g, padding, 0)
        return d_state, (d_x.astype(output.dtype), d_log_a.astype(log_a.dtype))

    tensors = (d_output, log_a, token_kind, output)
    d_initial, (d_x, d_log_a) = scan_chunks(step, d_final, tensors, reverse=True)
    return d_x, d_log_a, d_initial, None


linear_scan = kernel_over_time("linear_scan", forward, backward, dropped=(0,))
