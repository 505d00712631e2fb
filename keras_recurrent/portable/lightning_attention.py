"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head."""

from keras import ops

from keras_recurrent.portable.gated_linear_attention import gated_linear_attention


def lightning_attention(q, k, v, log_decay, initial_state=None, token_kind=None):
    """q, k: [B, T, H, K]; v: [B, T, H, V]; log_decay: [H].

    Returns ([B, T, H, V], [B, H, K, V]).
    """
    log_f = ops.broadcast_to(ops.reshape(log_decay, (-1, 1)), (*ops.shape(q)[:3], 1))
    return gated_linear_attention(q, k, v, log_f, initial_state, token_kind)
