"""y = activation(gate) * x.  Shazeer 2020, arXiv:2002.05202."""

import math

import tensorflow as tf

from keras_recurrent.backends.tensorflow._common import accumulation_dtype


def gated_linear_unit(gate, x, activation="silu"):
    """gate, x: of one shape; activation: "silu" or "gelu". Returns that shape in x's dtype."""
    dtype = accumulation_dtype(gate, x)
    gate = z = tf.cast(gate, dtype)
    if activation == "gelu":
        # z σ(2 u), not z (1 + tanh(u)) / 2: that loses the digits of a gate that is nearly shut.
        z = math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)
    return tf.cast(gate * _sigmoid(z) * tf.cast(x, dtype), x.dtype)


@tf.custom_gradient
def _sigmoid(z):
    # TensorFlow takes 1 - σ(z) for σ(-z), which loses the digits of a gate that is nearly open.
    return tf.sigmoid(z), lambda d_s: d_s * tf.sigmoid(z) * tf.sigmoid(-z)
