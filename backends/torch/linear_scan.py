"""h_t = exp(log_a_t) * h_{t-1} + x_t, with the gradients of `backends/reference/linear_scan.py`."""

import torch

from ._common import (
    accumulation_dtype,
    applied_decay_,
    fill_,
    filled,
    fresh,
    kernel_over_time,
    kind_masks,
    state_or_zeros,
    step_masks,
    where,
)
from ._scan import adjoint_scan, scan_, times_previous_


def _step(x, log_a, initial_state, token_kind):
    dtype = accumulation_dtype(x, log_a, initial_state)
    starts, padding = step_masks(token_kind, 2)
    state = state_or_zeros(initial_state, x[:, 0].shape, dtype, x)
    a = where(starts, 0.0, log_a[:, 0].to(dtype).exp())
    h = where(padding, state, torch.addcmul(x[:, 0].to(dtype), a, state))
    return h.to(x.dtype).unsqueeze(1), h


def _decay(log_a, token_kind, dtype):
    starts, padding = kind_masks(token_kind)
    a = log_a.new_empty(log_a.shape, dtype=dtype)  # contiguous, even if log_a is not
    torch.exp(log_a.to(dtype), out=a)
    return applied_decay_(a, starts, padding)


def _forward(x, log_a, initial_state, token_kind):
    dtype = accumulation_dtype(x, log_a, initial_state)
    state = state_or_zeros(initial_state, x[:, 0].shape, dtype, x)
    _, padding = kind_masks(token_kind)
    inputs = filled(x.to(dtype), padding, 0)
    h = _decay(log_a, token_kind, dtype)
    scan_(h, inputs, state, h)
    return h.to(x.dtype), fresh(h[:, -1], dtype)


def _backward(x, log_a, initial_state, token_kind, h, dh, d_state):
    dtype = accumulation_dtype(h, log_a, initial_state)
    state = state_or_zeros(initial_state, d_state.shape, dtype, h)
    _, padding = kind_masks(token_kind)
    a = _decay(log_a, token_kind, dtype)
    g = adjoint_scan(a, dh.to(dtype), d_state)
    d_log_a = a.mul_(g)
    d_initial = fresh(d_log_a[:, 0], dtype)
    times_previous_(d_log_a, h, state)
    return (
        fill_(g, padding, 0).to(h.dtype),
        fill_(d_log_a, padding, 0).to(log_a.dtype),
        d_initial,
    )


linear_scan = kernel_over_time(
    "linear_scan", _forward, _backward, lambda x, *_: (x.shape[0], x.shape[2]), _step, dropped=(0,)
)
