"""The real-gated linear recurrent unit.  De et al. 2024, arXiv:2402.19427, §2.4.

    r_t = σ(gate_a_t),  i_t = σ(gate_x_t),  log a_t = -8 softplus(-Λ) r_t
    h_t = a_t h_{t-1} + s_t i_t x_t,  s_t = sqrt(1 - a_t²); a_t = 0, s_t = 1 at a restart

With g_t = dh_t + a_{t+1} g_{t+1} the gradients are

    dx = g s i,  di = g s x,  dlog a = a g h_{t-1} - a² g i x / s
    dr = -8 softplus(-Λ) dlog a,  dΛ = 8 σ(-Λ) Σ r dlog a

where the s that divides is bounded below as in the released code.
"""

import tensorflow as tf

from keras_recurrent.backends.tensorflow._common import (
    accumulation_dtype,
    as_tensors,
    dense,
    filled,
    kind_masks,
    previous,
    state_or_zeros,
    total,
)
from keras_recurrent.backends.tensorflow._scan import adjoint_scan, scan

_SCALE = 8.0
# The derivative of sqrt(z) is taken as 1 / sqrt(max(4 z, 1e-6)).
_SMALLEST_MULTIPLIER = 5e-4


def rg_lru(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None):
    """x, gate_a, gate_x: [B, T, D]; a_logit: [D].

    Returns ([B, T, D] in x's dtype, [B, D] in float32, or float64 if an argument is float64).
    """
    x, gate_a, gate_x, a_logit, initial_state = as_tensors(
        x, gate_a, gate_x, a_logit, initial_state
    )
    dtype = accumulation_dtype(x, gate_a, gate_x, a_logit, initial_state)
    restart, padding = kind_masks(token_kind)

    def gates(gate_a, gate_x, a_logit):
        """exp(-gate_a), exp(-gate_x), r, i, log a, a, s."""
        # In float32 tf.sigmoid is up to six units in the last place off on a CPU, and tf.softplus
        # four: σ by hand stays below two, and the softplus of D numbers costs nothing in float64.
        exp_a, exp_x = tf.exp(-tf.cast(gate_a, dtype)), tf.exp(-tf.cast(gate_x, dtype))
        r, i = 1 / (1 + exp_a), 1 / (1 + exp_x)
        softplus = tf.math.softplus(-tf.cast(a_logit, tf.float64))
        log_a = r * tf.cast(-_SCALE * softplus, dtype)
        a = filled(filled(tf.exp(log_a), restart, 0), padding, 1)
        s = filled(tf.sqrt(-tf.math.expm1(2 * log_a)), restart, 1)
        return exp_a, exp_x, r, i, log_a, a, s

    @tf.custom_gradient
    def run(x, gate_a, gate_x, a_logit, state):
        *_, i, _, a, s = gates(gate_a, gate_x, a_logit)
        h = scan(a, filled(s * i * tf.cast(x, dtype), padding, 0), state)
        output, final_state = tf.cast(h, x.dtype), h[:, -1]

        def gradient(dh, d_state):
            exp_a, exp_x, r, i, log_a, a, s = gates(gate_a, gate_x, a_logit)
            g, e = adjoint_scan(a, dense(dh, output, dtype), dense(d_state, final_state, dtype))
            gi, inputs = g * i, tf.cast(x, dtype)
            dx = gi * s
            d_gate_x = dx * inputs / (1 + 1 / exp_x)
            d_log_a = e * previous(tf.cast(output, dtype), state)
            d_log_a -= gi * inputs * a * a / tf.maximum(s, _SMALLEST_MULTIPLIER)
            d_gate_a = d_log_a * log_a / (1 + 1 / exp_a)
            d_softplus = total(filled(d_log_a * r, padding, 0))
            d_logit = _SCALE * d_softplus * tf.sigmoid(-tf.cast(a_logit, dtype))
            return (
                tf.cast(filled(dx, padding, 0), x.dtype),
                tf.cast(filled(d_gate_a, padding, 0), gate_a.dtype),
                tf.cast(filled(d_gate_x, padding, 0), gate_x.dtype),
                tf.cast(d_logit, a_logit.dtype),
                e[:, 0],
            )

        return (output, final_state), gradient

    return run(x, gate_a, gate_x, a_logit, state_or_zeros(initial_state, x, dtype))
