"""losses = log Σ_v exp(z_v) - z_token of the logits z = x E^T, or with a cap c tanh(x E^T / c).

Logits are computed for one chunk of tokens at a time and never materialized for all. The gradients
recompute them.
"""

import tensorflow as tf

from ..constants import CROSSENTROPY_CHUNK
from ._common import accumulation_dtype, as_tensors, dense_gradient, differentiate


def linear_crossentropy(x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum"):
    """x: [..., D]; embedding: [V, D]; tokens, sample_weight: [...]."""
    x, embedding, tokens, sample_weight = as_tensors(x, embedding, tokens, sample_weight)
    dtype, tokens = accumulation_dtype(x, embedding, sample_weight), tf.cast(tokens, tf.int64)
    if sample_weight is None:
        weights = tf.ones(tf.shape(tokens), dtype)
    else:
        weights = tf.cast(sample_weight, dtype)
        tokens = tf.where(weights == 0, tf.zeros((), tokens.dtype), tokens)
    shape, static = tf.shape(tokens), tokens.shape
    flat = tf.reshape(x, (-1, x.shape[-1])), embedding, tf.reshape(weights, (-1,))
    losses, best = _losses(*flat, tf.reshape(tokens, (-1,)), soft_cap)
    losses, best = (tf.ensure_shape(tf.reshape(t, shape), static) for t in (losses, best))
    return tf.reduce_sum(losses) if reduction == "sum" else losses, best


def _losses(x, embedding, weights, tokens, soft_cap):
    """Weighted losses and predicted tokens of x [N, D]."""
    dtype, count = weights.dtype, tf.shape(weights)[0]

    @tf.custom_gradient
    def run(x, embedding, weights):
        wide = tf.cast(embedding, dtype)
        losses, best = tf.map_fn(
            lambda chunk: _chunk_losses(chunk[0], wide, chunk[1], soft_cap),
            _split_chunks(x, tokens),
            fn_output_signature=(dtype, tf.int32),
        )
        losses, best = (tf.reshape(t, (-1,))[:count] for t in (losses, best))

        def gradients(d_losses, _=None):
            d_losses = dense_gradient(d_losses, losses, dtype)
            chunks = _split_chunks(x, tokens, weights * d_losses)
            d_x = tf.TensorArray(x.dtype, tf.shape(chunks[0])[0], element_shape=chunks[0].shape[1:])

            def step(i, d_x, total):
                x, tokens, d = (chunk[i] for chunk in chunks)
                with tf.GradientTape() as tape:
                    tape.watch((x, wide))
                    losses, _ = _chunk_losses(x, wide, tokens, soft_cap)
                d_x_chunk, d_chunk = differentiate(tape, losses, (x, wide), d)
                return i + 1, d_x.write(i, d_x_chunk), total + d_chunk

            num_chunks, start = d_x.size(), (0, d_x, tf.zeros_like(wide))
            _, d_x, total = tf.while_loop(lambda i, *_: i < num_chunks, step, start)
            d_x = tf.reshape(d_x.stack(), (-1, x.shape[-1]))[:count]
            return d_x, tf.cast(total, embedding.dtype), losses * d_losses

        return (losses * weights, best), gradients

    return run(x, embedding, weights)


def _split_chunks(*tensors):
    """Splits tensors [tokens, ...] into chunks [N, S, ...]; the last is padded with zeros."""
    rows = tf.shape(tensors[0])[0]
    size = tf.minimum(tf.maximum(rows, 1), CROSSENTROPY_CHUNK)
    count = -(-rows // size)

    def cut(array):
        array = tf.pad(array, [(0, count * size - rows)] + [(0, 0)] * (len(array.shape) - 1))
        return tf.reshape(array, (count, size, *array.shape[1:]))

    return tuple(map(cut, tensors))


def _chunk_losses(x, embedding, tokens, soft_cap):
    """Losses and predicted tokens of a chunk; embedding: [V, D] in the accumulation dtype."""
    dtype = embedding.dtype
    z = tf.matmul(tf.cast(x, dtype), embedding, transpose_b=True)
    if soft_cap is not None:
        z = soft_cap * tf.tanh(z / soft_cap)
    vocabulary = tf.shape(embedding, tf.int64)[0]
    largest = tf.stop_gradient(tf.reduce_max(z, axis=-1, keepdims=True))
    total = tf.reduce_sum(tf.exp(z - largest), axis=-1)
    is_label = tf.range(vocabulary) == tokens[:, None]
    label_logit = tf.reduce_sum(tf.where(is_label, z, tf.zeros((), dtype)), axis=-1)
    # A factor of NaN for unknown tokens: it applies to the gradient, too.
    known = (tokens >= 0) & (tokens < vocabulary)
    factor = tf.where(known, tf.ones((), dtype), tf.constant(float("nan"), dtype))
    losses = factor * (tf.math.log(total) + (largest[:, 0] - label_logit))
    return losses, tf.argmax(z, axis=-1, output_type=tf.int32)
