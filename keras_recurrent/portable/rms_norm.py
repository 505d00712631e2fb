"""y = x / sqrt(mean(x²) + ε) * scale."""

from keras import ops

from keras_recurrent.backends.constants import SMALLEST_SCALED_EPSILON, SQUARES_SCALE
from keras_recurrent.portable._common import sum_dtype


def rms_norm(x, scale=None, epsilon=0.0):
    """x: [..., D]; scale: [D] or None. Returns [..., D]."""
    dtype = sum_dtype(x, scale)
    y = ops.cast(x, dtype)
    z = _mean_square(y, SQUARES_SCALE)
    if epsilon < SMALLEST_SCALED_EPSILON:
        z = ops.where(z > 1.0, z, _mean_square(y, 1 / SQUARES_SCALE))
    z = z + epsilon
    zero = ops.equal(z, 0.0)
    r = ops.where(zero, ops.zeros_like(z), ops.rsqrt(ops.where(zero, ops.ones_like(z), z)))
    y = y * r
    return ops.cast(y if scale is None else y * ops.cast(scale, dtype), x.dtype)


def _mean_square(x, scale):
    # Not `ops.mean`, which reduces float64 in float32 on torch.
    return ops.sum(x * scale * x, axis=-1, keepdims=True) / x.shape[-1] / scale
