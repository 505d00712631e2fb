"""`linear_scan` of complex numbers; `backends/reference/complex_linear_scan.py` has equations."""

import tensorflow as tf

from ._scan import recurrence


def complex_linear_scan(x, log_a, phase, initial_state=None, token_kind=None):
    """x: [B, T, 2D]; log_a, phase: [B, T, D], log_a <= 0."""

    def elements(x, log_a, phase):
        return tf.complex(log_a, phase), x

    return recurrence(elements, (x, log_a, phase), initial_state, token_kind, is_complex=True)
