"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head."""

from .scalar_decay_attention import kernel

lightning_attention = kernel("lightning_attention")
