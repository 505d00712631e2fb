"""The real-gated linear recurrent unit: h_t = a_t h_{t-1} + sqrt(1 - a_t²) σ(gate_x_t) x_t."""

from keras import ops

from keras_recurrent.backends.constants import DECAY_EXPONENT, MAX_SQRT_GRADIENT
from keras_recurrent.portable._common import (
    fill_where,
    minus_expm1,
    sigmoid,
    softplus,
    sum_dtype,
    token_masks,
)
from keras_recurrent.portable.linear_scan import linear_scan


def rg_lru(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None):
    """x, gate_a, gate_x: [B, T, D]; a_logit: [D]. Returns ([B, T, D], [B, D])."""
    dtype = sum_dtype(x, gate_a, gate_x, a_logit, initial_state)
    starts, padding = token_masks(token_kind, 3)
    real_x, gate_a, gate_x = (
        fill_where(padding, 0.0, ops.cast(t, dtype)) for t in (x, gate_a, gate_x)
    )
    log_a_open = -DECAY_EXPONENT * softplus(-ops.cast(a_logit, dtype))
    log_a = sigmoid(gate_a) * log_a_open
    scale = fill_where(starts, 1.0, _sqrt(minus_expm1(2.0 * log_a)))
    inputs = scale * sigmoid(gate_x) * real_x
    h, state = linear_scan(inputs, log_a, initial_state, token_kind)
    return ops.cast(h, x.dtype), state


def _sqrt(x):
    """The square root, whose derivative is bounded by `MAX_SQRT_GRADIENT`."""
    root = ops.stop_gradient(ops.sqrt(x))
    divisor = 2.0 * ops.maximum(root, 0.5 / MAX_SQRT_GRADIENT)
    return root + (x - ops.stop_gradient(x)) / divisor
