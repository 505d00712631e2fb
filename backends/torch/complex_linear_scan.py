"""`linear_scan` of complex numbers; `backends/reference/complex_linear_scan.py` has equations."""

import torch

from ._common import (
    accumulation_dtype,
    applied_decay_,
    fill_,
    fresh,
    kernel_over_time,
    kind_masks,
    state_or_zeros,
)
from ._scan import adjoint_scan, scan_, times_previous_


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


def _backward(x, log_a, phase, initial_state, token_kind, h, dh, d_state):
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


complex_linear_scan = kernel_over_time(
    "complex_linear_scan", _forward, _backward, lambda x, *_: (x.shape[0], x.shape[2])
)
