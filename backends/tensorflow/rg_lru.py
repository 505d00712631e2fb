"""The real-gated linear recurrent unit, with the equations of `backends/reference/rg_lru.py`."""

import tensorflow as tf

from ..constants import DECAY_EXPONENT, MAX_SQRT_GRADIENT
from ._common import (
    accumulation_dtype,
    applied_decay,
    as_tensors,
    dense_gradient,
    filled,
    kind_masks,
    sigmoids,
    state_or_zeros,
    sum_over_tokens,
)
from ._scan import adjoint_scan, previous, scan

# Lower bound of the divisor s = sqrt(1 - a²): bounds the derivative of the root, 1 / (2 s).
SMALLEST_DIVISOR = 1 / (2 * MAX_SQRT_GRADIENT)


def rg_lru(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None):
    """x, gate_a, gate_x: [B, T, D]; a_logit: [D].

    Returns ([B, T, D] in x's dtype, [B, D] in float32, or float64 if an argument is float64).
    """
    x, gate_a, gate_x, a_logit, initial_state = as_tensors(
        x, gate_a, gate_x, a_logit, initial_state
    )
    dtype = accumulation_dtype(x, gate_a, gate_x, a_logit, initial_state)
    starts, padding = kind_masks(token_kind)

    def gates(gate_a, gate_x, a_logit):
        """(r, 1 - r), (i, 1 - i), log a, a, s."""
        of_a, of_x = (sigmoids(tf.cast(gate, dtype)) for gate in (gate_a, gate_x))
        # On a CPU, in float32, the error of tf.softplus is up to four units in the last place. For
        # only D numbers, float64 costs little.
        softplus = tf.math.softplus(-tf.cast(a_logit, tf.float64))
        log_a = of_a[0] * tf.cast(-DECAY_EXPONENT * softplus, dtype)
        a = applied_decay(tf.exp(log_a), starts, padding)
        s = filled(tf.sqrt(-tf.math.expm1(2 * log_a)), starts, 1)
        return of_a, of_x, log_a, a, s

    @tf.custom_gradient
    def run(x, gate_a, gate_x, a_logit, state):
        _, (i, _), _, a, s = gates(gate_a, gate_x, a_logit)
        h = scan(a, filled(s * i * tf.cast(x, dtype), padding, 0), state)
        output, final_state = tf.cast(h, x.dtype), h[:, -1]

        def gradient(dh, d_state):
            (r, rest_a), (i, rest_x), log_a, a, s = gates(gate_a, gate_x, a_logit)
            g, e = adjoint_scan(
                a, dense_gradient(dh, output, dtype), dense_gradient(d_state, final_state, dtype)
            )
            gi, inputs = g * i, tf.cast(x, dtype)
            dx = gi * s
            d_gate_x = dx * inputs * rest_x
            d_log_a = e * previous(tf.cast(output, dtype), state)
            d_log_a -= gi * inputs * a * a / tf.maximum(s, SMALLEST_DIVISOR)
            d_gate_a = d_log_a * log_a * rest_a
            d_softplus = sum_over_tokens(filled(d_log_a * r, padding, 0))
            d_logit = DECAY_EXPONENT * d_softplus * tf.sigmoid(-tf.cast(a_logit, dtype))
            return (
                tf.cast(filled(dx, padding, 0), x.dtype),
                tf.cast(filled(d_gate_a, padding, 0), gate_a.dtype),
                tf.cast(filled(d_gate_x, padding, 0), gate_x.dtype),
                tf.cast(d_logit, a_logit.dtype),
                e[:, 0],
            )

        return (output, final_state), gradient

    return run(
        x,
        gate_a,
        gate_x,
        a_logit,
        state_or_zeros(initial_state, [tf.shape(x)[0], x.shape[2]], dtype),
    )
