"""The real-gated linear recurrent unit: h_t = a_t h_{t-1} + sqrt(1 - a_t²) σ(gate_x_t) x_t."""

from keras import ops

from keras_recurrent.backends.constants import DECAY_EXPONENT
from keras_recurrent.portable._common import (
    applied_decay,
    fill_where,
    minus_expm1,
    softplus,
    state_or_zeros,
    sum_dtype,
    token_masks,
)
from keras_recurrent.portable._scan import scan


def rg_lru(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None):
    """x, gate_a, gate_x: [B, T, D]; a_logit: [D]. Returns ([B, T, D], [B, D])."""
    dtype = sum_dtype(x, gate_a, gate_x, a_logit, initial_state)
    starts, padding = token_masks(token_kind, 3)
    batch, _, width = ops.shape(x)
    state = state_or_zeros(initial_state, (batch, width), dtype)
    log_a_open = -DECAY_EXPONENT * softplus(-ops.cast(a_logit, dtype))
    log_a = ops.sigmoid(ops.cast(gate_a, dtype)) * log_a_open
    scale = fill_where(starts, 1.0, ops.sqrt(minus_expm1(2.0 * log_a)))
    inputs = scale * ops.sigmoid(ops.cast(gate_x, dtype)) * ops.cast(x, dtype)
    a = applied_decay(ops.exp(log_a), starts, padding)
    h = scan(a, fill_where(padding, 0.0, inputs), state)
    return ops.cast(h, x.dtype), h[:, -1]
