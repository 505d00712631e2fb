"""The largest logits of each row, and the logarithm of the sum of exp of all."""

from keras import ops


def top_logits(x, count):
    """x: [B, V]. Returns (float32 values [B, count], int32 indices, float32 log sum [B]).

    Equal numbers are in the order of their indices on JAX and TensorFlow.
    """
    x = ops.cast(x, "float32")
    values, indices = ops.top_k(x, count, sorted=True)
    return values, ops.cast(indices, "int32"), ops.logsumexp(x, axis=-1)
