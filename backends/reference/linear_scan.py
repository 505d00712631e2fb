"""h_t = exp(log_a_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, section 2.4.

With a_t = exp(log_a_t) and g_t = dh_t + a_{t+1} g_{t+1} the gradients are
dx_t = g_t, dlog_a_t = g_t a_t h_{t-1}.
"""

import numpy as np

from ..constants import CONTINUES, PADDING, STARTS
from ._common import broadcast_kinds, cast, state_or_zeros


def linear_scan(x, log_a, initial_state=None, token_kind=None, dtype=np.float64):
    """x, log_a: [B, T, D]. Returns ([B, T, D], [B, D])."""
    x, log_a = cast(dtype, x, log_a)
    h = state_or_zeros(initial_state, x[:, 0].shape, dtype)
    kind = broadcast_kinds(token_kind, x)
    output = np.empty_like(x)
    for t in range(x.shape[1]):
        k = kind[:, t]
        decayed = np.where(k == STARTS, 0, np.exp(log_a[:, t]) * h)
        h = np.where(k == PADDING, h, decayed + x[:, t])
        output[:, t] = h
    return output, h


def linear_scan_gradient(
    d_output, d_final_state, x, log_a, initial_state=None, token_kind=None, dtype=np.float64
):
    """Returns the gradients of x, log_a and initial_state."""
    h, _ = linear_scan(x, log_a, initial_state, token_kind, dtype)
    x, log_a, d_output, g = cast(dtype, x, log_a, d_output, d_final_state)
    first = state_or_zeros(initial_state, x[:, 0].shape, dtype)
    kind = broadcast_kinds(token_kind, x)
    d_x, d_log_a = np.zeros_like(x), np.zeros_like(log_a)
    for t in reversed(range(x.shape[1])):
        k = kind[:, t]
        a = np.exp(log_a[:, t])
        g = g + d_output[:, t]
        d_x[:, t] = np.where(k == PADDING, 0, g)
        d_log_a[:, t] = np.where(k == CONTINUES, g * a * (h[:, t - 1] if t else first), 0)
        g = np.where(k == PADDING, g, np.where(k == STARTS, 0, a * g))
    return d_x, d_log_a, g
