"""Heads of queries and keys of one token: RMSNorm, then rotary embedding (arXiv:2104.09864)."""

from keras import ops

from keras_recurrent.portable._common import cos, sin
from keras_recurrent.portable.rms_norm import rms_norm


def prepare_heads(x, position, frequencies=None, scale=None, epsilon=None):
    """x: [B, H, K]; position: [B, 1]; frequencies: [R] or None; scale: [K] or None.

    `frequencies` rotates channels j and j + R by frequencies_j p radians at position p.
    """
    if scale is not None:
        x = rms_norm(x, scale, epsilon)
    if frequencies is None:
        return x
    angle = ops.cast(position, x.dtype)[..., None] * ops.cast(frequencies, x.dtype)
    half, c, s = angle.shape[2], cos(angle), sin(angle)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return ops.concatenate([a * c - b * s, b * c + a * s, rest], axis=2)
