"""h_t = exp(log_a_t) * h_{t-1} + x_t."""

from keras import ops

from keras_recurrent.portable._common import (
    fill_where,
    state_or_zeros,
    sum_dtype,
    token_masks,
)
from keras_recurrent.portable._scan import scan


def linear_scan(x, log_a, initial_state=None, token_kind=None):
    """x, log_a: [B, T, D]. Returns ([B, T, D], [B, D])."""
    dtype = sum_dtype(x, log_a, initial_state)
    starts, padding = token_masks(token_kind, 3)
    batch, _, width = ops.shape(x)
    state = state_or_zeros(initial_state, (batch, width), dtype)
    inputs, log_a = (fill_where(padding, 0.0, ops.cast(t, dtype)) for t in (x, log_a))
    h = scan(fill_where(starts, 0.0, ops.exp(log_a)), inputs, state)
    return ops.cast(h, x.dtype), h[:, -1]
