"""y = x / sqrt(mean(x²) + ε) * scale.  Zhang and Sennrich 2019, arXiv:1910.07467."""

import tensorflow as tf

from ..constants import SMALLEST_SCALED_EPSILON, SQUARES_SCALE
from ._common import accumulation_dtype


def rms_norm(x, scale=None, epsilon=0.0):
    """x: [..., D]; scale: [D] or None. Returns [..., D] in x's dtype."""
    dtype = accumulation_dtype(x, scale)
    y = _normalized(tf.cast(x, dtype), epsilon)
    return tf.cast(y if scale is None else y * tf.cast(scale, dtype), x.dtype)


def _normalized(x, epsilon):
    """x r, r = 1 / sqrt(mean(x²) + ε)."""

    @tf.custom_gradient
    def normalized(x):
        def gradient(d_y):
            """r (dy - y mean(y dy)): the derivative of r has r³, which overflows float32."""
            r = _reciprocal_root(x, epsilon)
            y = x * r
            return r * (d_y - y * tf.reduce_mean(y * d_y, axis=-1, keepdims=True))

        return x * _reciprocal_root(x, epsilon), gradient

    return normalized(x)


def _reciprocal_root(x, epsilon):
    """r; 0 where the mean square is 0 or out of the range of the dtype."""
    z = _mean_square(x, SQUARES_SCALE)
    if epsilon < SMALLEST_SCALED_EPSILON:
        z = tf.where(z > 1, z, _mean_square(x, 1 / SQUARES_SCALE))
    z += epsilon
    return tf.where(z == 0, tf.zeros_like(z), tf.math.rsqrt(z))


def _mean_square(x, scale):
    # Not the square of a product with a constant: XLA would multiply by the square of the constant.
    return tf.reduce_mean(x * (x * scale), axis=-1, keepdims=True) / scale
