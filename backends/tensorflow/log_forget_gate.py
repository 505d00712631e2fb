"""log f = log(β + (1 - β) σ(logits)).  Qin et al. 2023, arXiv:2311.04823, section 3.2."""

import tensorflow as tf

from keras_recurrent.backends.tensorflow._common import accumulation_dtype, sigmoid


def log_forget_gate(logits, lower_bound=None):
    """logits: [..., D]; lower_bound: [2, D], log β and log(1 - β), or None, β = 0.

    Returns [..., D] in float32, or float64 if an argument is float64.
    """
    dtype = accumulation_dtype(logits, lower_bound)
    log_f = _log_sigmoid(tf.cast(logits, dtype))
    if lower_bound is None:
        return log_f
    log_bound, log_rest = tf.unstack(tf.cast(lower_bound, dtype))
    rest = log_rest + log_f
    larger = tf.stop_gradient(tf.maximum(log_bound, rest))
    log_f = larger + tf.math.log(tf.exp(log_bound - larger) + tf.exp(rest - larger))
    # The gradient is that of this sum; the value is a more exact one, cut off at 0.
    exact = larger + tf.math.log1p(tf.exp(-tf.abs(log_bound - rest)))
    return log_f + tf.stop_gradient(tf.minimum(exact, 0) - log_f)


@tf.custom_gradient
def _log_sigmoid(z):
    """On a CPU, TensorFlow's own, and its gradient, are wrong by four units in the last place."""
    value = tf.minimum(z, 0) - tf.math.log1p(tf.exp(-tf.abs(z)))
    return value, lambda d_value: d_value * sigmoid(-z)
