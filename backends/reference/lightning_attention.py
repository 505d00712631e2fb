"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2405.17381 (Lightning Attention), and 2023, arXiv:2307.14995
(TransNormerLLM). Padding does not decay the state.
"""

import numpy as np

from ._common import cast
from ._matrix_state import forward, gradient


def lightning_attention(q, k, v, log_decay, initial_state=None, token_kind=None, dtype=np.float64):
    """q, k: [B, T, H, K]; v: [B, T, H, V]; log_decay: [H].

    Returns ([B, T, H, V], [B, H, K, V]).
    """
    q, k, v, log_decay = cast(dtype, q, k, v, log_decay)
    return forward(q, k, v, _decays(log_decay, k), initial_state, token_kind)


def lightning_attention_gradient(
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
    """Returns the gradients of q, k, v, log_decay (a constant: zeros) and initial_state."""
    q, k, v, log_decay, d_output, d_final_state = cast(
        dtype, q, k, v, log_decay, d_output, d_final_state
    )
    d_q, d_k, d_v, _, d_initial = gradient(
        d_output, d_final_state, q, k, v, _decays(log_decay, k), initial_state, token_kind
    )
    return d_q, d_k, d_v, np.zeros_like(log_decay), d_initial


def _decays(log_decay, k):
    """The decay of every token and key channel, one number per head."""
    return np.broadcast_to(np.exp(log_decay)[:, None], k.shape)
