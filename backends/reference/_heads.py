"""Heads of queries and keys of one token: RMSNorm, then rotary embedding (arXiv:2104.09864)."""

import numpy as np

from ._common import cast
from .rms_norm import rms_norm


def prepare_heads(x, position, frequencies=None, scale=None, epsilon=None):
    """x: [B, H, K]; position: [B]; frequencies: [R] or None; scale: [K] or None.

    `frequencies` rotates channels j and j + R by frequencies_j p radians at position p.
    """
    if scale is not None:
        x = rms_norm(x, scale, epsilon, x.dtype)
    if frequencies is None:
        return x
    half = len(frequencies)
    angle = np.asarray(position, x.dtype)[:, None, None] * cast(x.dtype, frequencies)[0]
    a, b = x[..., :half], x[..., half : 2 * half]
    turned = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return np.concatenate((*turned, x[..., 2 * half :]), axis=2)
