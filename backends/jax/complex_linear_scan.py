"""h_t = exp(log_a_t + i phase_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, appendix B."""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._scan import gradient, scan, shift
from keras_recurrent.backends.jax._time_chunks import before, over_chunks
from keras_recurrent.backends.jax._tokens import (
    accumulate,
    drop_padding,
    effective_decay,
    first_state,
    where_going_on,
)


@jax.jit
def complex_linear_scan(x, log_a, phase, initial_state=None, token_kind=None):
    """x: [B, T, 2D], real parts before imaginary ones; log_a, phase: [B, T, D].

    Returns ([B, T, 2D] in x's dtype, [B, 2D] in float32).
    """
    dtype = accumulate(x, log_a, phase)
    initial_state = first_state(initial_state, (x.shape[0], x.shape[2]), dtype)
    return _complex_linear_scan(x, log_a, phase, initial_state, token_kind)


@jax.custom_vjp
def _complex_linear_scan(x, log_a, phase, initial_state, token_kind):
    dtype = initial_state.dtype

    def step(state, start, x, log_a, phase, token_kind):
        (u,) = drop_padding(token_kind, x.astype(dtype))
        a = _decay(log_a, phase, token_kind, dtype)
        h = _real(scan(a, _complex(u), _complex(state)))
        return h[:, -1], (h.astype(x.dtype),)

    final_state, (output,) = over_chunks(step, initial_state, (x, log_a, phase, token_kind))
    return output, final_state


def _forward(x, log_a, phase, initial_state, token_kind):
    output, final_state = _complex_linear_scan(x, log_a, phase, initial_state, token_kind)
    return (output, final_state), (log_a, phase, initial_state, token_kind, output)


def _backward(saved, d_outputs):
    # A gradient g of complex numbers stands for d/d real + i d/d imaginary.
    log_a, phase, initial_state, token_kind, output = saved
    dtype = initial_state.dtype
    d_output, d_final = d_outputs

    def step(d_state, start, d_y, log_a, phase, token_kind, h):
        a = _decay(log_a, phase, token_kind, dtype)
        d_y, d_state = _complex(d_y.astype(dtype)), _complex(d_state)
        g, d_state = gradient(jnp.conj(a), d_y, d_state)
        state = before(output, start, initial_state[:, None])[:, 0]
        h = shift(_complex(h.astype(dtype)), _complex(state))
        product = where_going_on(token_kind, jnp.conj(g) * a * h)
        (d_x,) = drop_padding(token_kind, _real(g))
        return _real(d_state), (
            d_x.astype(output.dtype),
            product.real.astype(log_a.dtype),
            -product.imag.astype(phase.dtype),
        )

    tensors = (d_output, log_a, phase, token_kind, output)
    d_initial, d_tensors = over_chunks(step, d_final, tensors, reverse=True)
    return *d_tensors, d_initial, None


_complex_linear_scan.defvjp(_forward, _backward)


def _decay(log_a, phase, token_kind, dtype):
    magnitude, phase = jnp.exp(log_a.astype(dtype)), phase.astype(dtype)
    a = jax.lax.complex(magnitude * jnp.cos(phase), magnitude * jnp.sin(phase))
    return effective_decay(token_kind, a)


def _complex(x):
    return jax.lax.complex(*jnp.split(x, 2, axis=-1))


def _real(h):
    return jnp.concatenate([h.real, h.imag], axis=-1)
