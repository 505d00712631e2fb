"""h_t = exp(log_a_t + i phase_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, appendix B.

In x and h the first half of the channels is the real part, the second half the imaginary part.
With a_t = exp(log_a_t + i phase_t) and g_t = dh_t + conj(a_{t+1}) g_{t+1} the gradients are
dx_t = g_t and dlog_a_t + i dphase_t = g_t conj(a_t h_{t-1}).
"""

import numpy as np

from ..constants import CONTINUES, PADDING, STARTS
from ._common import broadcast_kinds, cast, state_or_zeros


def complex_linear_scan(x, log_a, phase, initial_state=None, token_kind=None, dtype=np.float64):
    """x: [B, T, 2D], real parts before imaginary ones; log_a, phase: [B, T, D].

    Returns ([B, T, 2D], [B, 2D]).
    """
    x, log_a, phase = cast(dtype, x, log_a, phase)
    u, h = _complex(x), _complex(state_or_zeros(initial_state, x[:, 0].shape, dtype))
    kind = broadcast_kinds(token_kind, x)
    output = np.empty_like(x)
    for t in range(x.shape[1]):
        k = kind[:, t]
        decayed = np.where(k == STARTS, 0, _decay(log_a[:, t], phase[:, t]) * h)
        h = np.where(k == PADDING, h, decayed + u[:, t])
        output[:, t] = _real(h)
    return output, _real(h)


def complex_linear_scan_gradient(
    d_output, d_final_state, x, log_a, phase, initial_state=None, token_kind=None, dtype=np.float64
):
    """Returns the gradients of x, log_a, phase and initial_state.

    A gradient g of complex numbers is d/d real + i d/d imaginary.
    """
    h = _complex(complex_linear_scan(x, log_a, phase, initial_state, token_kind, dtype)[0])
    x, log_a, phase, d_output, g = cast(dtype, x, log_a, phase, d_output, d_final_state)
    d_output, g = _complex(d_output), _complex(g)
    first = _complex(state_or_zeros(initial_state, x[:, 0].shape, dtype))
    kind = broadcast_kinds(token_kind, x)
    d_x, d_log_a, d_phase = np.zeros_like(x), np.zeros_like(log_a), np.zeros_like(phase)
    for t in reversed(range(x.shape[1])):
        k = kind[:, t]
        a = _decay(log_a[:, t], phase[:, t])
        g = g + d_output[:, t]
        d_x[:, t] = _real(np.where(k == PADDING, 0, g))
        product = np.where(k == CONTINUES, np.conj(g) * a * (h[:, t - 1] if t else first), 0)
        d_log_a[:, t] = product.real
        d_phase[:, t] = -product.imag
        g = np.where(k == PADDING, g, np.where(k == STARTS, 0, np.conj(a) * g))
    return d_x, d_log_a, d_phase, _real(g)


def _decay(log_a, phase):
    return np.exp(log_a) * (np.cos(phase) + 1j * np.sin(phase).astype(phase.dtype))


def _complex(x):
    real, imaginary = np.split(x, 2, axis=-1)
    return real + 1j * imaginary


def _real(h):
    return np.concatenate([h.real, h.imag], axis=-1)
