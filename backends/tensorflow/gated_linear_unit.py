"""y = activation(gate) * x.  Shazeer 2020, arXiv:2002.05202."""

import tensorflow as tf

from keras_recurrent.backends.tensorflow._common import accumulation_dtype


def unsupported(gate, x, activation="silu") -> str | None:
    """Why this kernel refuses these arguments; None if it accepts them."""
    return None


def gated_linear_unit(gate, x, activation="silu"):
    """gate, x: the same shape; activation: "silu" or "gelu". Returns that shape in x's dtype."""
    dtype = accumulation_dtype(gate, x)
    gate = tf.cast(gate, dtype)
    gate = tf.nn.silu(gate) if activation == "silu" else tf.nn.gelu(gate, approximate=True)
    return tf.cast(gate * tf.cast(x, dtype), x.dtype)
