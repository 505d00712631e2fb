"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head."""

from keras import ops

from keras_recurrent.portable._common import fill_where, sum_dtype, token_masks
from keras_recurrent.portable._linear_attention import linear_attention


def lightning_attention(q, k, v, log_decay, initial_state=None, token_kind=None):
    """q, k: [B, T, H, K]; v: [B, T, H, V]; log_decay: [H].

    Returns ([B, T, H, V], [B, H, K, V]).
    """
    dtype = sum_dtype(q, k, v, log_decay, initial_state)
    starts, padding = token_masks(token_kind, 4)
    batch, length, heads = ops.shape(q)[:3]
    log_f = ops.reshape(ops.cast(log_decay, dtype), (1, 1, heads, 1))
    log_f = fill_where(padding, 0.0, ops.broadcast_to(log_f, (batch, length, heads, 1)))
    q, k, w = (fill_where(padding, 0.0, ops.cast(x, dtype)) for x in (q, k, v))
    output, state = linear_attention(q, k, w, log_f, initial_state, starts, padding)
    return ops.cast(output, v.dtype), state
