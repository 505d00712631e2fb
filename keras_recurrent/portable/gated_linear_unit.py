"""y = activation(gate) * x, activation(z) = z σ(u)."""

import math

from keras import ops

from keras_recurrent.backends.constants import GELU_CLIP
from keras_recurrent.portable._common import sigmoid, sum_dtype


def gated_linear_unit(gate, x, activation="silu"):
    """gate, x: tensors of equal shape; activation: "silu" or "gelu". Returns that shape."""
    dtype = sum_dtype(gate, x)
    u = z = ops.cast(gate, dtype)
    if activation == "gelu":
        z = ops.clip(z, -GELU_CLIP, GELU_CLIP)
        u = math.sqrt(8 / math.pi) * (z + 0.044715 * z * z * z)
    return ops.cast(ops.cast(gate, dtype) * sigmoid(u) * ops.cast(x, dtype), x.dtype)
