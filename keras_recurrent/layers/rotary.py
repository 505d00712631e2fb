"""Rotary positions."""

from keras import ops


def frequencies(rotary_dim, max_wavelength, dtype):
    """Returns the rotation of each pair of channels in radians per token; see `rotate`."""
    half = rotary_dim // 2
    return max_wavelength ** (-ops.arange(0, half, dtype=dtype) / max(half, 1))


def rotate(x, positions, max_wavelength, rotary_dim):
    """Rotates pairs of channels by angles proportional to the position (RoPE, arXiv:2104.09864).

    Channel j below r / 2 and channel j + r / 2 are rotated by position * max_wavelength^(-2j / r),
    where r is `rotary_dim`; channels from r on do not change.

    Args:
        x: `[B, T, heads, head_dim]`, float32 or float64, which is also the dtype of the angles.
        positions: integers `[B, T]`.
        max_wavelength: number.
        rotary_dim: integer, even, at most head_dim.
    """
    if not rotary_dim:
        return x
    half = rotary_dim // 2
    angle = ops.cast(positions, x.dtype)[:, :, None, None]
    angle = angle * frequencies(rotary_dim, max_wavelength, x.dtype)
    cos, sin = ops.cos(angle), ops.sin(angle)
    a, b, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return ops.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
