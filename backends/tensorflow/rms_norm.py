"""y = x / sqrt(mean(x²) + ε) * scale.  Zhang and Sennrich 2019, arXiv:1910.07467."""

import tensorflow as tf

from keras_recurrent.backends.tensorflow._common import accumulation_dtype


def rms_norm(x, scale=None, epsilon=0.0):
    """x: [..., D]; scale: [D] or None. Returns [..., D] in x's dtype."""
    dtype = accumulation_dtype(x, scale)
    y = tf.cast(x, dtype)
    y *= tf.math.rsqrt(tf.reduce_mean(tf.square(y), axis=-1, keepdims=True) + epsilon)
    return tf.cast(y if scale is None else y * tf.cast(scale, dtype), x.dtype)
