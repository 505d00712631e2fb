"""S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head."""

from keras import ops

from keras_recurrent.portable._common import fill_where, minus_expm1, sum_dtype, token_masks
from keras_recurrent.portable._linear_attention import linear_attention


def gated_linear_attention(q, k, v, log_f, initial_state=None, token_kind=None):
    """q, k, log_f: [B, T, H, K]; v: [B, T, H, V]; k None: 1 - exp(log_f).

    For `scalar_decay_attention`, q and k are [B, T, G, K] and log_f [B, T, H, 1].
    Returns ([B, T, H, V], [B, H, K, V]).
    """
    dtype = sum_dtype(q, k, v, log_f, initial_state)
    starts, padding = token_masks(token_kind, 4)
    log_f, q, w = (fill_where(padding, 0.0, ops.cast(x, dtype)) for x in (log_f, q, v))
    k = minus_expm1(log_f) if k is None else fill_where(padding, 0.0, ops.cast(k, dtype))
    output, state = linear_attention(q, k, w, log_f, initial_state, starts)
    return ops.cast(output, v.dtype), state
