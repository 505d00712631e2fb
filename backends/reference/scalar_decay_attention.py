"""S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Dao and Gu 2024, arXiv:2405.21060, section 3 (Mamba-2, where q, k and v are C, B and X times the
step size). Head h has the query and the key of group h // (H / G).
"""

import numpy as np

from ._common import cast
from ._matrix_state import forward, gradient


def scalar_decay_attention(
    q, k, v, log_decay, initial_state=None, token_kind=None, dtype=np.float64
):
    """q, k: [B, T, G, K]; v: [B, T, H, V]; log_decay: [B, T, H].

    Returns ([B, T, H, V], [B, H, K, V]).
    """
    q, k, v, log_decay = cast(dtype, q, k, v, log_decay)
    q, k, f = _heads(q, k, log_decay)
    return forward(q, k, v, f, initial_state, token_kind)


def scalar_decay_attention_gradient(
    d_output,
    d_final_state,
    q,
    k,
    v,
    log_decay,
    initial_state=None,
    token_kind=None,
    dtype=np.float64,
):
    """Returns the gradients of q, k, v, log_decay and initial_state."""
    groups = q.shape[2]
    q, k, v, log_decay, d_output, d_final_state = cast(
        dtype, q, k, v, log_decay, d_output, d_final_state
    )
    q, k, f = _heads(q, k, log_decay)
    d_q, d_k, d_v, d_log_f, d_initial = gradient(
        d_output, d_final_state, q, k, v, f, initial_state, token_kind
    )
    d_q, d_k = (np.sum(d.reshape(*d.shape[:2], groups, -1, d.shape[3]), axis=3) for d in (d_q, d_k))
    return d_q, d_k, d_v, np.sum(d_log_f, axis=3), d_initial


def _heads(q, k, log_decay):
    """Returns q, k and the decays of the key channels for each head, all [B, T, H, K]."""
    share = log_decay.shape[2] // q.shape[2]
    q, k = (np.repeat(x, share, axis=2) for x in (q, k))
    return q, k, np.broadcast_to(np.exp(log_decay)[..., None], k.shape)
