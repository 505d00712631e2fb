"""loss = log Σ_v exp(logits_v) - logits_token.

Residuals are the logits in their own dtype, and the largest logit and the sum of each token. XLA
(`jit_compile`, Keras's default) fuses the other steps; without it they allocate temporaries of the
size of the logits.
"""

import tensorflow as tf

from ._common import accumulation_dtype, as_tensors, dense_gradient


def token_crossentropy(logits, tokens):
    """logits: [..., V]; tokens: [...], integers.

    Returns [...] in float32, or float64 if logits are float64; NaN for a token not in 0..V-1.
    """
    logits, tokens = as_tensors(logits, tokens)
    return _losses(logits, tf.cast(tokens, tf.int64))


@tf.custom_gradient
def _losses(logits, tokens):
    dtype = accumulation_dtype(logits)
    size = tf.shape(logits, tf.int64)[-1]
    known = (tokens >= 0) & (tokens < size)

    def logits_and_label_mask():
        """The logits in the accumulation dtype, and a mask of the label's logit."""
        return tf.cast(logits, dtype), tf.range(size) == tokens[..., None]

    def nan_where_unknown(losses):
        return tf.where(known, losses, tf.constant(float("nan"), dtype))

    z, is_own = logits_and_label_mask()
    largest = tf.reduce_max(z, axis=-1)
    total = tf.reduce_sum(tf.exp(z - largest[..., None]), axis=-1)
    label_mask = tf.reduce_sum(tf.where(is_own, z, tf.zeros((), dtype)), axis=-1)
    losses = nan_where_unknown(tf.math.log(total) + (largest - label_mask))

    def gradients(d_losses):
        z, is_own = logits_and_label_mask()
        d_losses = nan_where_unknown(dense_gradient(d_losses, losses, dtype))[..., None]
        softmax = tf.exp(z - largest[..., None]) / total[..., None]
        return tf.cast((softmax - tf.cast(is_own, dtype)) * d_losses, logits.dtype), None

    return losses, gradients
