"""S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2404.07904, section 3 (HGRN2, where k_t = 1 - exp(log_f_t)); Yang et al.
2023, arXiv:2312.06635, section 4 (gated linear attention).
"""

import numpy as np

from ..constants import PADDING
from ._common import broadcast_kinds, cast
from ._matrix_state import forward, gradient


def gated_linear_attention(q, k, v, log_f, initial_state=None, token_kind=None, dtype=np.float64):
    """q, k, log_f: [B, T, H, K]; v: [B, T, H, V]; k None: 1 - exp(log_f).

    Returns ([B, T, H, V], [B, H, K, V]).
    """
    q, v, log_f = cast(dtype, q, v, log_f)
    return forward(q, _keys(k, log_f), v, np.exp(log_f), initial_state, token_kind)


def gated_linear_attention_gradient(
    d_output,
    d_final_state,
    q,
    k,
    v,
    log_f,
    initial_state=None,
    token_kind=None,
    dtype=np.float64,
):
    """Returns the gradients of q, k (None where k is), v, log_f and initial_state."""
    q, v, log_f, d_output, d_final_state = cast(dtype, q, v, log_f, d_output, d_final_state)
    f = np.exp(log_f)
    d_q, d_k, d_v, d_log_f, d_initial = gradient(
        d_output, d_final_state, q, _keys(k, log_f), v, f, initial_state, token_kind
    )
    if k is None:
        d_log_f -= np.where(broadcast_kinds(token_kind, v) == PADDING, 0, d_k * f)
        d_k = None
    return d_q, d_k, d_v, d_log_f, d_initial


def _keys(k, log_f):
    return -np.expm1(log_f) if k is None else np.asarray(k).astype(log_f.dtype)
