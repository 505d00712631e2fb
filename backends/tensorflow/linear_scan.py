"""h_t = exp(log_a_t) * h_{t-1} + x_t, with the gradients of `backends/reference/linear_scan.py`."""

import tensorflow as tf

from ._common import (
    accumulation_dtype,
    applied_decay,
    as_tensors,
    dense_gradient,
    filled,
    kind_masks,
    state_or_zeros,
)
from ._scan import adjoint_scan, previous, scan


def linear_scan(x, log_a, initial_state=None, token_kind=None):
    """x, log_a: [B, T, D], log_a <= 0.

    Returns ([B, T, D] in x's dtype, [B, D] in float32, or float64 if an argument is float64).
    """
    x, log_a, initial_state = as_tensors(x, log_a, initial_state)
    dtype = accumulation_dtype(x, log_a, initial_state)
    starts, padding = kind_masks(token_kind)

    def decay(log_a):
        return applied_decay(tf.exp(tf.cast(log_a, dtype)), starts, padding)

    @tf.custom_gradient
    def run(x, log_a, state):
        h = scan(decay(log_a), filled(tf.cast(x, dtype), padding, 0), state)
        output, final_state = tf.cast(h, x.dtype), h[:, -1]

        def gradient(dh, d_state):
            g, e = adjoint_scan(
                decay(log_a),
                dense_gradient(dh, output, dtype),
                dense_gradient(d_state, final_state, dtype),
            )
            d_log_a = e * previous(tf.cast(output, dtype), state)
            return (
                tf.cast(filled(g, padding, 0), x.dtype),
                tf.cast(filled(d_log_a, padding, 0), log_a.dtype),
                e[:, 0],
            )

        return (output, final_state), gradient

    state = state_or_zeros(initial_state, [tf.shape(x)[0], x.shape[2]], dtype)
    return run(x, log_a, state)
