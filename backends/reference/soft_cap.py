"""The soft cap of a decoding step's logits: c tanh(x / c)."""

import numpy as np

from ._common import cast


def soft_cap(x, cap, dtype=np.float64):
    """x: [B, V]; cap: a number above 0. Returns [B, V]."""
    (x,) = cast(dtype, x)
    return np.tanh(x / cap) * cap
