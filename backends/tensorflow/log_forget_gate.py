"""log f = log(β + (1 - β) σ(logits)).  Qin et al. 2023, arXiv:2311.04823, section 3.2."""

import tensorflow as tf

from ._common import accumulation_dtype, sigmoid


def log_forget_gate(logits, lower_bound=None):
    """logits: [..., D]; lower_bound: [2, D], log β and log(1 - β), or None, β = 0.

    Returns [..., D] in float32, or float64 if an argument is float64.
    """
    dtype = accumulation_dtype(logits, lower_bound)
    logits = tf.cast(logits, dtype)
    log_s = _log_sigmoid(logits)
    if lower_bound is None:
        return log_s
    log_bound, log_rest = tf.unstack(tf.cast(lower_bound, dtype))
    rest = log_rest + log_s
    # Clipped to a finite number: where both terms are -inf, the sum is, too.
    larger = tf.maximum(tf.stop_gradient(tf.maximum(log_bound, rest)), logits.dtype.min)
    of_sum = larger + tf.math.log(tf.exp(log_bound - larger) + tf.exp(rest - larger))
    forgotten = tf.stop_gradient(tf.exp(log_rest) * sigmoid(-logits))
    # Near 1, the value is log(1 - forgotten) and the gradient that of the sum.
    near_1 = tf.math.log1p(-forgotten) + (of_sum - tf.stop_gradient(of_sum))
    return tf.where(forgotten <= 0.5, near_1, of_sum)


@tf.custom_gradient
def _log_sigmoid(z):
    """log σ(z); on a CPU, TensorFlow's own and its gradient have errors of four ulp."""
    value = tf.minimum(z, 0) - tf.math.log1p(tf.exp(-tf.abs(z)))
    return value, lambda d_value: d_value * sigmoid(-z)
