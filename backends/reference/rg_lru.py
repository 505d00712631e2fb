"""The real-gated linear recurrent unit.  De et al. 2024, arXiv:2402.19427, section 2.4.

    r_t = sigmoid(gate_a_t)                     i_t = sigmoid(gate_x_t)
    log a_t = -8 softplus(-a_logit) r_t         s_t = sqrt(1 - a_t^2)
    h_t = a_t h_{t-1} + s_t i_t x_t

Where a document starts, a_t = 0 and s_t = 1. Equation 6 of the paper has softplus(a_logit); with
a = sigmoid(a_logit) it is softplus(-a_logit). With g_t = dh_t + a_{t+1} g_{t+1} the gradients are

    dx = g s i                                  di = g s x
    dlog a = a g h_{t-1} - a^2 g i x / s        dr = -8 softplus(-a_logit) dlog a
    da_logit = 8 sigmoid(-a_logit) sum(r dlog a)

where 1 / s is bounded by `MAX_SQRT_GRADIENT`.
"""

import numpy as np

from ..constants import CONTINUES, DECAY_EXPONENT, MAX_SQRT_GRADIENT, PADDING, STARTS
from ._common import broadcast_kinds, cast, sigmoid, state_or_zeros


def rg_lru(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None, dtype=np.float64):
    """x, gate_a, gate_x: [B, T, D]; a_logit: [D]. Returns ([B, T, D], [B, D])."""
    x, gate_a, gate_x, a_logit = cast(dtype, x, gate_a, gate_x, a_logit)
    h = state_or_zeros(initial_state, x[:, 0].shape, dtype)
    kind = broadcast_kinds(token_kind, x)
    output = np.empty_like(x)
    for t in range(x.shape[1]):
        k = kind[:, t]
        log_a = -DECAY_EXPONENT * _softplus(-a_logit) * sigmoid(gate_a[:, t])
        gated = sigmoid(gate_x[:, t]) * x[:, t]
        going_on = np.exp(log_a) * h + np.sqrt(-np.expm1(2 * log_a)) * gated
        h = np.where(k == PADDING, h, np.where(k == STARTS, gated, going_on))
        output[:, t] = h
    return output, h


def rg_lru_gradient(
    d_output,
    d_final_state,
    x,
    gate_a,
    gate_x,
    a_logit,
    initial_state=None,
    token_kind=None,
    dtype=np.float64,
):
    """Returns the gradients of x, gate_a, gate_x, a_logit and initial_state."""
    h, _ = rg_lru(x, gate_a, gate_x, a_logit, initial_state, token_kind, dtype)
    x, gate_a, gate_x, a_logit, d_output, g = cast(
        dtype, x, gate_a, gate_x, a_logit, d_output, d_final_state
    )
    first = state_or_zeros(initial_state, x[:, 0].shape, dtype)
    kind = broadcast_kinds(token_kind, x)
    d_x, d_gate_a, d_gate_x = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    d_a_logit = np.zeros_like(a_logit)
    for t in reversed(range(x.shape[1])):
        k = kind[:, t]
        r, i = sigmoid(gate_a[:, t]), sigmoid(gate_x[:, t])
        log_a = -DECAY_EXPONENT * _softplus(-a_logit) * r
        a, z = np.exp(log_a), -np.expm1(2 * log_a)
        g = g + d_output[:, t]

        multiplier = np.where(k == STARTS, 1, np.sqrt(z))
        d_x[:, t] = np.where(k == PADDING, 0, g * multiplier * i)
        d_gate_x[:, t] = np.where(
            k == PADDING, 0, g * multiplier * x[:, t] * i * sigmoid(-gate_x[:, t])
        )
        d_sqrt = 1 / np.sqrt(np.maximum(4 * z, 1 / MAX_SQRT_GRADIENT**2))
        d_log_a = g * a * (h[:, t - 1] if t else first) - g * i * x[:, t] * d_sqrt * 2 * a * a
        d_log_a = np.where(k == CONTINUES, d_log_a, 0)
        d_gate_a[:, t] = d_log_a * log_a * sigmoid(-gate_a[:, t])
        d_a_logit += np.sum(d_log_a * DECAY_EXPONENT * r * sigmoid(-a_logit), axis=0)

        g = np.where(k == PADDING, g, np.where(k == STARTS, 0, a * g))
    return d_x, d_gate_a, d_gate_x, d_a_logit, g


def _softplus(z):
    return np.logaddexp(0, z)
