"""The index of the largest number of each row."""

from keras import ops


def argmax(x):
    """x: [B, V]. Returns int32 [B], in each row the first index of the largest number."""
    return ops.cast(ops.argmax(x, axis=-1), "int32")
