"""h_t = exp(log_a_t + i phase_t) * h_{t-1} + x_t, real parts followed by imaginary parts."""

from keras import ops

from keras_recurrent.portable._common import (
    fill_where,
    state_or_zeros,
    sum_dtype,
    token_masks,
)
from keras_recurrent.portable._scan import scan


def complex_linear_scan(x, log_a, phase, initial_state=None, token_kind=None):
    """x: [B, T, 2D]; log_a, phase: [B, T, D]. Returns ([B, T, 2D], [B, 2D])."""
    dtype = sum_dtype(x, log_a, phase, initial_state)
    starts, padding = token_masks(token_kind, 3)
    batch, _, width = ops.shape(x)
    state = state_or_zeros(initial_state, (batch, width), dtype)
    inputs, log_a, phase = (fill_where(padding, 0.0, ops.cast(t, dtype)) for t in (x, log_a, phase))
    r = fill_where(starts, 0.0, ops.exp(log_a))
    a = ops.concatenate([r * ops.cos(phase), r * ops.sin(phase)], axis=-1)
    h = scan(a, inputs, state, _multiply)
    return ops.cast(h, x.dtype), h[:, -1]


def _multiply(a, b):
    (a, ai), (b, bi) = ops.split(a, 2, axis=-1), ops.split(b, 2, axis=-1)
    return ops.concatenate([a * b - ai * bi, a * bi + ai * b], axis=-1)
