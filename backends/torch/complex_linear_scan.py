"""h_t = exp(log_a_t + i phase_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, appendix B.

In x and h the first half of the channels is the real part, the second half the imaginary part.
With a_t = exp(log_a_t + i phase_t) and g_t = dh_t + conj(a_{t+1}) g_{t+1} the gradients are
dx_t = g_t and dlog_a_t + i dphase_t = g_t conj(a_t h_{t-1}).
"""

import torch

from ._common import (
    accumulation_dtype,
    applied_decay_,
    define_operator,
    fill_,
    fresh,
    kind_masks,
    state_or_zeros,
)
from ._scan import adjoint_scan, scan_, times_previous_


def complex_linear_scan(x, log_a, phase, initial_state=None, token_kind=None):
    """x: [B, T, 2D]; log_a, phase: [B, T, D], log_a <= 0.

    Returns ([B, T, 2D] in x's dtype, [B, 2D] in float32, or float64 if an argument is float64).
    """
    return _operator(x, log_a, phase, initial_state, token_kind)


def _to_complex(tensor, dtype):
    real, imag = tensor.to(dtype).chunk(2, dim=-1)
    return torch.complex(real, imag)


def _to_real(tensor, dtype):
    return torch.cat((tensor.real, tensor.imag), dim=-1).to(dtype)


def _decay(log_a, phase, token_kind, dtype):
    starts, padding = kind_masks(token_kind)
    a = torch.polar(torch.exp(log_a.to(dtype)), phase.to(dtype)).contiguous()
    return applied_decay_(a, starts, padding)


def _forward(x, log_a, phase, initial_state, token_kind):
    dtype = accumulation_dtype(x, log_a, phase, initial_state)
    state = state_or_zeros(initial_state, x[:, 0].shape, dtype, x)
    _, padding = kind_masks(token_kind)
    inputs = fill_(_to_complex(x, dtype), padding, 0)
    h = _decay(log_a, phase, token_kind, dtype)
    scan_(h, inputs, _to_complex(state, dtype), h)
    return _to_real(h, x.dtype), _to_real(h[:, -1], dtype)


def _backward(dh, d_state, h, x, log_a, phase, initial_state, token_kind):
    dtype = accumulation_dtype(x, log_a, phase, initial_state)
    state = state_or_zeros(initial_state, d_state.shape, dtype, x)
    _, padding = kind_masks(token_kind)
    conj_a = _decay(log_a, -phase, token_kind, dtype)
    g = adjoint_scan(conj_a, _to_complex(dh, dtype), _to_complex(d_state, dtype))
    d_exponent = conj_a.mul_(g)
    d_initial = _to_real(d_exponent[:, 0], dtype)
    conj_h, conj_state = (_to_complex(z, dtype).conj_physical() for z in (h, state))
    times_previous_(d_exponent, conj_h, conj_state)
    fill_(d_exponent, padding, 0)
    return (
        _to_real(fill_(g, padding, 0), x.dtype),
        fresh(d_exponent.real, log_a.dtype),
        fresh(d_exponent.imag, phase.dtype),
        d_initial,
    )


_operator = define_operator(
    "complex_linear_scan", _forward, _backward, lambda x, *_: (x.shape[0], x.shape[2])
)
