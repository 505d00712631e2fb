"""y = activation(gate) * x.  Shazeer 2020, arXiv:2002.05202."""

import math

import tensorflow as tf

from ..constants import GELU_CLIP
from ._common import accumulation_dtype, sigmoid


def gated_linear_unit(gate, x, activation="silu"):
    """gate, x: [..., D]; activation: "silu" or "gelu". Returns [..., D] in x's dtype."""
    dtype = accumulation_dtype(gate, x)
    gate = z = tf.cast(gate, dtype)
    if activation == "gelu":
        # z σ(2 u), not z (1 + tanh(u)) / 2, which loses the digits of a nearly closed gate.
        z = tf.clip_by_value(gate, -GELU_CLIP, GELU_CLIP)
        z = math.sqrt(8 / math.pi) * (z + 0.044715 * z**3)
    return tf.cast(gate * sigmoid(z) * tf.cast(x, dtype), x.dtype)
