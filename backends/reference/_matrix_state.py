"""The states of linear attention, shared by its definitions: one matrix a head."""

import numpy as np

from keras_recurrent.backends.reference._common import PADDING, STARTS


def forward(q, k, v, f, initial_state, token_kind):
    """S_t = diag(f_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t. Returns the outputs and the last S."""
    output = np.zeros_like(v)
    for t, state in _states(k, v, f, initial_state, token_kind):
        output[:, t] = np.sum(q[:, t, :, :, None] * state, axis=2)
    return output, state


def gradient(d_output, g, q, k, v, f, initial_state, token_kind):
    """The gradients of q, k, v, log f and the initial state; g is that of the final state.

    A padded output has none.
    """
    states = dict(_states(k, v, f, initial_state, token_kind))
    states[-1] = _first_state(k, v, initial_state)
    kind = kinds(v, token_kind)
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


def kinds(v, token_kind):
    """The kind of each token as [B, T, 1, 1], beside v: [B, T, H, V]."""
    if token_kind is None:
        return np.zeros((*v.shape[:2], 1, 1), np.int8)
    return np.asarray(token_kind)[:, :, None, None]


def _first_state(k, v, initial_state):
    """The [B, H, K, V] before the first token; zeros when nothing is given."""
    if initial_state is None:
        return np.zeros((v.shape[0], *k.shape[2:], v.shape[3]), v.dtype)
    return np.asarray(initial_state, v.dtype)


def _states(k, v, f, initial_state, token_kind):
    """Each token's number and the state after it."""
    state, kind = _first_state(k, v, initial_state), kinds(v, token_kind)
    for t in range(v.shape[1]):
        before = np.where(kind[:, t, ..., None] == STARTS, 0, f[:, t, ..., None] * state)
        after = before + k[:, t, ..., None] * v[:, t, :, None]
        state = np.where(kind[:, t, ..., None] == PADDING, state, after)
        yield t, state
