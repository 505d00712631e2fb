"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t, as in `backends/jax`."""

from .scalar_decay_attention import scalar_decay_attention


def lightning_attention(q, k, v, log_decay, initial_state=None, token_kind=None):
    """q, k: [B, T, H, K]; v: [B, T, H, V]; log_decay: [H], a constant, whose gradient is 0."""
    return scalar_decay_attention(q, k, v, log_decay, initial_state, token_kind)
