"""`linear_scan` of complex numbers; `backends/reference/complex_linear_scan.py` has equations."""

import jax
import jax.numpy as jnp

from ._common import (
    applied_decay,
    default_zero_state,
    default_zero_state_gradient,
    filled,
    kind_masks,
    to_complex,
    to_real,
)
from ._operation import kernel_over_time
from ._scan import adjoint_scan, previous, scan
from ._time_chunks import elements_before, scan_chunks


@default_zero_state(lambda x, *_: (x.shape[0], x.shape[2]))
def forward(x, log_a, phase, initial_state, token_kind):
    dtype = initial_state.dtype

    def step(state, start, x, log_a, phase, token_kind):
        starts, padding = kind_masks(token_kind)
        a = applied_decay(_decay(log_a, phase, dtype), starts, padding)
        inputs = filled(x.astype(dtype), padding, 0)
        h = to_real(scan(a, to_complex(inputs), to_complex(state)))
        return h[:, -1], (h.astype(x.dtype),)

    final_state, (output,) = scan_chunks(step, initial_state, (x, log_a, phase, token_kind))
    return output, final_state


@default_zero_state_gradient
def backward(_, log_a, phase, initial_state, token_kind, output, d_output, d_final):
    # A gradient g of complex numbers is d/d real + i d/d imaginary.
    dtype = initial_state.dtype

    def step(d_state, start, dh, log_a, phase, token_kind, h):
        starts, padding = kind_masks(token_kind)
        a = applied_decay(_decay(log_a, phase, dtype), starts, padding)
        dh, d_state = to_complex(dh.astype(dtype)), to_complex(d_state)
        g, d_state = adjoint_scan(jnp.conj(a), dh, d_state)
        state = elements_before(output, start, initial_state[:, None])[:, 0]
        h = previous(to_complex(h.astype(dtype)), to_complex(state))
        d_exponent = filled(filled(jnp.conj(g) * a * h, starts, 0), padding, 0)
        d_x = filled(to_real(g), padding, 0)
        return to_real(d_state), (
            d_x.astype(output.dtype),
            d_exponent.real.astype(log_a.dtype),
            -d_exponent.imag.astype(phase.dtype),
        )

    tensors = (d_output, log_a, phase, token_kind, output)
    d_initial, d_tensors = scan_chunks(step, d_final, tensors, reverse=True)
    return *d_tensors, d_initial, None


complex_linear_scan = kernel_over_time("complex_linear_scan", forward, backward, dropped=(0,))


def _decay(log_a, phase, dtype):
    magnitude, phase = jnp.exp(log_a.astype(dtype)), phase.astype(dtype)
    return jax.lax.complex(magnitude * jnp.cos(phase), magnitude * jnp.sin(phase))
