"""`linear_scan` of complex numbers; `backends/reference/complex_linear_scan.py` has equations."""

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


def complex_linear_scan(x, log_a, phase, initial_state=None, token_kind=None):
    """x: [B, T, 2D]; log_a, phase: [B, T, D], log_a <= 0.

    Returns ([B, T, 2D] in x's dtype, [B, 2D] in float32, or float64 if an argument is float64).
    """
    x, log_a, phase, initial_state = as_tensors(x, log_a, phase, initial_state)
    dtype = accumulation_dtype(x, log_a, phase, initial_state)
    starts, padding = kind_masks(token_kind)

    def to_complex(tensor):
        return tf.complex(*tf.split(tf.cast(tensor, dtype), 2, axis=-1))

    def decay(log_a, phase):
        size = applied_decay(tf.exp(tf.cast(log_a, dtype)), starts, padding)
        phase = filled(tf.cast(phase, dtype), padding, 0)
        return tf.complex(size * tf.cos(phase), size * tf.sin(phase))

    @tf.custom_gradient
    def run(x, log_a, phase, state):
        h = scan(decay(log_a, phase), to_complex(filled(x, padding, 0)), to_complex(state))
        output, final_state = _to_real(h, x.dtype), _to_real(h[:, -1], dtype)

        def gradient(dh, d_state):
            conj_a = decay(log_a, -phase)
            dh, d_state = (
                to_complex(dense_gradient(dh, output, dtype)),
                to_complex(dense_gradient(d_state, final_state, dtype)),
            )
            g, e = adjoint_scan(conj_a, dh, d_state)
            d_exponent = e * tf.math.conj(previous(to_complex(output), to_complex(state)))
            return (
                filled(_to_real(g, x.dtype), padding, 0),
                tf.cast(filled(tf.math.real(d_exponent), padding, 0), log_a.dtype),
                tf.cast(filled(tf.math.imag(d_exponent), padding, 0), phase.dtype),
                _to_real(e[:, 0], dtype),
            )

        return (output, final_state), gradient

    state = state_or_zeros(initial_state, [tf.shape(x)[0], x.shape[2]], dtype)
    return run(x, log_a, phase, state)


def _to_real(tensor, dtype):
    return tf.cast(tf.concat([tf.math.real(tensor), tf.math.imag(tensor)], axis=-1), dtype)
