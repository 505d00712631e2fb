"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2405.17381 (Lightning Attention), and 2023, arXiv:2307.14995
(TransNormerLLM). Padding does not decay the state.
"""

import numpy as np

from .scalar_decay_attention import scalar_decay_attention, scalar_decay_attention_gradient


def lightning_attention(q, k, v, log_decay, initial_state=None, token_kind=None, dtype=np.float64):
    """q, k: [B, T, H, K]; v: [B, T, H, V]; log_decay: [H].

    Returns ([B, T, H, V], [B, H, K, V]).
    """
    log_decay = np.broadcast_to(log_decay, k.shape[:3])
    return scalar_decay_attention(q, k, v, log_decay, initial_state, token_kind, dtype)


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
    tensors = q, k, v, np.broadcast_to(log_decay, k.shape[:3])
    d_q, d_k, d_v, _, d_initial = scalar_decay_attention_gradient(
        d_output, d_final_state, *tensors, initial_state, token_kind, dtype
    )
    return d_q, d_k, d_v, np.zeros(log_decay.shape, dtype), d_initial
