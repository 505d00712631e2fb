"""The real-gated linear recurrent unit, with the equations of `backends/reference/rg_lru.py`."""

import tensorflow as tf

from ..constants import DECAY_EXPONENT, MAX_SQRT_GRADIENT
from ._common import filled, kind_masks, scaled, sigmoid
from ._scan import recurrence


def rg_lru(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None):
    """x, gate_a, gate_x: [B, T, D]; a_logit: [D]."""
    starts, _ = kind_masks(token_kind)

    def elements(x, gate_a, gate_x, a_logit):
        # On a CPU, in float32, the error of tf.softplus is up to four units in the last place. For
        # only D numbers, float64 costs little.
        softplus = tf.math.softplus(-tf.cast(a_logit, tf.float64))
        rate = tf.cast(-DECAY_EXPONENT * softplus, x.dtype)
        log_a = scaled(rate, sigmoid(gate_a))
        return log_a, filled(_root(log_a), starts, 1) * sigmoid(gate_x) * x

    return recurrence(elements, (x, gate_a, gate_x, a_logit), initial_state, token_kind)


@tf.custom_gradient
def _root(log_a):
    """sqrt(1 - a²); its derivative is bounded by `MAX_SQRT_GRADIENT`."""
    root = tf.sqrt(-tf.math.expm1(2 * log_a))

    def gradient(d):
        a = tf.exp(log_a)
        return -d * a * a / tf.maximum(root, 1 / (2 * MAX_SQRT_GRADIENT))

    return root, gradient
