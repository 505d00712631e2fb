"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head."""

from keras import ops

from keras_recurrent.portable.scalar_decay_attention import scalar_decay_attention


def lightning_attention(q, k, v, log_decay, initial_state=None, token_kind=None):
    """q, k: [B, T, H, K]; v: [B, T, H, V]; log_decay: [H].

    Returns ([B, T, H, V], [B, H, K, V]).
    """
    log_decay = ops.broadcast_to(ops.stop_gradient(log_decay), ops.shape(q)[:3])
    return scalar_decay_attention(q, k, v, log_decay, initial_state, token_kind)
