"""Linear attention with decays f_t, shared by its definitions. The state is a matrix per head."""

import numpy as np

from ..constants import PADDING, STARTS
from ._common import broadcast_kinds, state_or_zeros


def forward(q, k, v, f, initial_state, token_kind):
    """S_t = diag(f_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t. Returns all o and the final S."""
    output = np.zeros_like(v)
    for t, state in _states(k, v, f, initial_state, token_kind):
        output[:, t] = np.sum(q[:, t, :, :, None] * state, axis=2)
    return output, state


def gradient(d_output, g, q, k, v, f, initial_state, token_kind):
    """The gradients of q, k, v, log f and the initial state; g is that of the final state.

    The gradient of the output of a padding token is ignored.
    """
    states = dict(_states(k, v, f, initial_state, token_kind))
    states[-1] = _state_before(k, v, initial_state)
    kind = broadcast_kinds(token_kind, v)
    d_q, d_k, d_v, d_log_f = (np.zeros_like(x) for x in (q, k, v, k))
    for t in reversed(range(v.shape[1])):
        padding, starts = kind[:, t] == PADDING, kind[:, t] == STARTS
        d_y = np.where(padding, 0, d_output[:, t])
        d_q[:, t] = np.sum(states[t] * d_y[:, :, None], axis=3)
        g = g + np.where(padding, 0, q[:, t])[..., None] * d_y[:, :, None]
        d_k[:, t] = np.where(padding, 0, np.sum(g * v[:, t, :, None], axis=3))
        d_v[:, t] = np.where(padding, 0, np.sum(g * k[:, t, ..., None], axis=2))
        decayed = np.where(starts[..., None], 0, f[:, t, ..., None] * g)
        d_log_f[:, t] = np.where(padding, 0, np.sum(decayed * states[t - 1], axis=3))
        g = np.where(padding[..., None], g, decayed)
    return d_q, d_k, d_v, d_log_f, g


def _state_before(k, v, initial_state):
    """The state [B, H, K, V] before the first token."""
    return state_or_zeros(initial_state, (v.shape[0], *k.shape[2:], v.shape[3]), v.dtype)


def _states(k, v, f, initial_state, token_kind):
    """Yields the index of each token and the state after it."""
    state, kind = _state_before(k, v, initial_state), broadcast_kinds(token_kind, v)
    for t in range(v.shape[1]):
        decayed = np.where(kind[:, t, ..., None] == STARTS, 0, f[:, t, ..., None] * state)
        updated = decayed + k[:, t, ..., None] * v[:, t, :, None]
        state = np.where(kind[:, t, ..., None] == PADDING, state, updated)
        yield t, state
