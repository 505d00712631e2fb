"""h_t = exp(log_a_t + i phase_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, appendix B.

In x and h the first half of the channels is the real part, the second half the imaginary part.
With a_t = exp(log_a_t + i phase_t) and g_t = dh_t + conj(a_{t+1}) g_{t+1} the gradients are
dx_t = g_t and dlog_a_t - i dphase_t = conj(g_t) a_t h_{t-1}.
"""

import jax
import jax.numpy as jnp

from ._common import (
    applied_decay,
    cast_state,
    default_zero_state,
    default_zero_state_gradient,
    define_gradient,
    filled,
    kind_masks,
    to_complex,
    to_real,
)
from ._scan import adjoint_scan, previous, scan
from ._time_chunks import elements_before, scan_chunks


@jax.jit
def complex_linear_scan(x, log_a, phase, initial_state=None, token_kind=None):
    """x: [B, T, 2D]; log_a, phase: [B, T, D].

    Returns ([B, T, 2D] in x's dtype, [B, 2D] in float32, or float64 if an argument is float64).
    """
    state = cast_state(initial_state, x, log_a, phase)
    run = define_gradient(_forward, _backward, dropped=(0,))
    return run(x, log_a, phase, state, token_kind)


@default_zero_state(lambda x, *_: (x.shape[0], x.shape[2]))
def _forward(x, log_a, phase, initial_state, token_kind):
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
def _backward(_, log_a, phase, initial_state, token_kind, output, d_output, d_final):
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


def _decay(log_a, phase, dtype):
    magnitude, phase = jnp.exp(log_a.astype(dtype)), phase.astype(dtype)
    return jax.lax.complex(magnitude * jnp.cos(phase), magnitude * jnp.sin(phase))
