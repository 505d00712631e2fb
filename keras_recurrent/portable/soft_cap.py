"""c tanh(x / c), the soft cap of logits."""

from keras import ops


def soft_cap(x, cap):
    """x: [B, V]; cap: a number above 0. Returns [B, V] in x's dtype."""
    return ops.multiply(ops.tanh(ops.divide(x, cap)), cap)
