"""The real-gated linear recurrent unit, with the equations of `backends/reference/rg_lru.py`."""

import torch

from ..constants import DECAY_EXPONENT, MAX_SQRT_GRADIENT
from ._common import (
    accumulation_dtype,
    blocks,
    fill_,
    fresh,
    kernel_over_time,
    masks_of_tokens,
    state_or_zeros,
    step_masks,
    total_,
    where,
)
from ._scan import adjoint_scan, scan_

# Lower bound of the divisor s = sqrt(1 - a²): bounds the derivative of the root, 1 / (2 s).
SMALLEST_DIVISOR = 1 / (2 * MAX_SQRT_GRADIENT)


def _step(x, gate_a, gate_x, a_logit, initial_state, token_kind):
    dtype = accumulation_dtype(x, gate_a, gate_x, a_logit, initial_state)
    starts, padding = step_masks(token_kind, 2)
    state = state_or_zeros(initial_state, x[:, 0].shape, dtype, x)
    u, v, w = (t[:, 0].to(dtype) for t in (gate_a, gate_x, x))
    log_a = torch.sigmoid(u) * _log_decay_of_open_gate(a_logit.to(dtype))
    s = where(starts, 1.0, (2 * log_a).expm1().neg().sqrt())
    h = torch.addcmul(s * torch.sigmoid(v) * w, where(starts, 0.0, log_a.exp()), state)
    h = where(padding, state, h)
    return h.to(x.dtype).unsqueeze(1), h


def _log_decay_of_open_gate(a_logit):
    """log a for r = 1."""
    return torch.nn.functional.logsigmoid(a_logit) * DECAY_EXPONENT


def _applied_log_decay(gate_a, log_a_open, starts, padding):
    """The log of the decay applied to the state: -inf at a start, 0 at padding, else log a."""
    log_a = torch.sigmoid(gate_a.to(log_a_open.dtype)).mul_(log_a_open)
    return fill_(fill_(log_a, starts, -torch.inf), padding, 0)


def _multiplier(log_a):
    """sqrt(1 - a²), which is 1 at a start."""
    return (log_a + log_a).expm1_().neg_().sqrt_()


# `_forward` and `_backward` compute all but the scan block by block and in place, so that
# temporaries stay in the cache.
def _forward(x, gate_a, gate_x, a_logit, initial_state, token_kind):
    dtype = accumulation_dtype(x, gate_a, gate_x, a_logit, initial_state)
    state = state_or_zeros(initial_state, x[:, 0].shape, dtype, x)
    log_a_open = _log_decay_of_open_gate(a_logit.to(dtype))
    a, h = (x.new_empty(x.shape, dtype=dtype) for _ in range(2))
    masks = masks_of_tokens(token_kind)
    for x_b, u, v, a_b, h_b, starts, padding in blocks(x, gate_a, gate_x, a, h, *masks):
        log_a = _applied_log_decay(u, log_a_open, starts, padding)
        torch.exp(log_a, out=a_b)
        s_i = _multiplier(log_a).mul_(v.to(dtype).sigmoid())
        fill_(torch.mul(s_i, x_b, out=h_b), padding, 0)
    scan_(a, h, state, h)
    return h.to(x.dtype), fresh(h[:, -1], dtype)


def _backward(x, gate_a, gate_x, a_logit, initial_state, token_kind, h, dh, d_state):
    dtype = accumulation_dtype(x, gate_a, gate_x, a_logit, initial_state)
    state = state_or_zeros(initial_state, d_state.shape, dtype, x)
    logit = a_logit.to(dtype)
    log_a_open = _log_decay_of_open_gate(logit)
    masks = masks_of_tokens(token_kind)

    a = x.new_empty(x.shape, dtype=dtype)
    for u, a_b, starts, padding in blocks(gate_a, a, *masks):
        torch.exp(_applied_log_decay(u, log_a_open, starts, padding), out=a_b)
    g = adjoint_scan(a, dh.to(dtype), d_state)
    d_initial = a[:, 0] * g[:, 0]

    # dx and d_gate_a reuse the buffers of g and a if the dtypes are equal.
    dx = g if x.dtype == dtype else x.new_empty(x.shape)
    d_gate_a = a if gate_a.dtype == dtype else gate_a.new_empty(x.shape)
    d_gate_x = gate_x.new_empty(x.shape)
    d_log_a_open = []
    inputs = blocks(x, h, gate_a, gate_x, a, g, *masks)
    for block, gradients in zip(inputs, blocks(dx, d_gate_a, d_gate_x), strict=True):
        x_b, h_b, u, v, a_b, g_b, starts, padding = block
        dx_b, d_u, d_v = gradients
        u, v = u.to(dtype), v.to(dtype)
        r, i = torch.sigmoid(u), torch.sigmoid(v)
        log_a = r * log_a_open
        s = fill_(_multiplier(log_a), starts, 1)
        d_log_a = g_b * torch.cat((state.unsqueeze(1), h_b[:, :-1]), dim=1)
        state = h_b[:, -1]

        gix = (g_b * x_b).mul_(i)
        fill_(torch.mul(g_b, i.mul_(s), out=dx_b), padding, 0)
        torch.mul(torch.sigmoid(v.neg()).mul_(s), gix, out=d_v)
        fill_(d_v, padding, 0)

        gix.mul_(a_b)
        d_log_a.addcdiv_(gix, s.clamp_min_(SMALLEST_DIVISOR), value=-1).mul_(a_b)
        d_log_a_open.append(fill_(r.mul_(d_log_a), padding, 0).sum((0, 1)))
        torch.mul(torch.sigmoid(u.neg()).mul_(log_a), d_log_a, out=d_u)
        fill_(d_u, padding, 0)
    d_logit = total_(d_log_a_open).mul_(DECAY_EXPONENT).mul_(torch.sigmoid(-logit))
    return dx, d_gate_a, d_gate_x, d_logit.to(a_logit.dtype), d_initial


rg_lru = kernel_over_time(
    "rg_lru", _forward, _backward, lambda x, *_: (x.shape[0], x.shape[2]), _step
)
