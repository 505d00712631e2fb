"""losses = log Σ_v exp(z_v) - z_token of the logits z = x E^T, or with a cap c tanh(x E^T / c).

Logits are computed for one chunk of tokens at a time and never materialized for all. The gradients
recompute them.
"""

import tensorflow as tf

from ..constants import CROSSENTROPY_CHUNK
from ._common import accumulation_dtype, as_tensors, dense_gradient


def linear_crossentropy(x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum"):
    """x: [..., D]; embedding: [V, D]; tokens, sample_weight: [...].

    Returns (losses times their weights, [...] or their sum, in float32, or float64 if a tensor is;
    the argmax of the logits, int32 [...]).
    """
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

    @tf.custom_gradient
    def run(x, embedding, weights):
        chunks = _split_chunks(x, weights, tokens)
        losses, best = tf.map_fn(
            lambda chunk: _chunk_losses(embedding, chunk, soft_cap)[:2],
            chunks,
            fn_output_signature=(weights.dtype, tf.int32),
        )
        count = tf.shape(weights)[0]
        losses, best = (tf.reshape(t, (-1,))[:count] for t in (losses, best))

        def gradients(d_losses, _=None):
            d = dense_gradient(d_losses, losses, weights.dtype)
            d_x, d_embedding = _gradients(x, embedding, weights * d, tokens, soft_cap)
            return d_x, d_embedding, losses * d

        return (losses * weights, best), gradients

    return run(x, embedding, weights)


def _gradients(x, embedding, weights, tokens, soft_cap):
    chunks = _split_chunks(x, weights, tokens)
    d_x_chunks = tf.TensorArray(x.dtype, tf.shape(chunks[0])[0], element_shape=chunks[0].shape[1:])

    def step(i, d_x_chunks, total):
        d_x, d_chunk = _chunk_losses(embedding, [p[i] for p in chunks], soft_cap)[2]()
        return i + 1, d_x_chunks.write(i, d_x), total + d_chunk

    start = 0, d_x_chunks, tf.zeros(tf.shape(embedding), weights.dtype)
    count = tf.shape(chunks[0])[0]
    _, d_x_chunks, total = tf.while_loop(lambda i, *_: i < count, step, start)
    d_x = tf.reshape(d_x_chunks.stack(), (-1, x.shape[-1]))[: tf.shape(x)[0]]
    return d_x, tf.cast(total, embedding.dtype)


def _split_chunks(x, weights, tokens):
    """Splits tokens into chunks [N, S, ...]; the last is padded with tokens of weight 0."""
    rows = tf.shape(x)[0]
    size = tf.minimum(tf.maximum(rows, 1), CROSSENTROPY_CHUNK)
    count = -(-rows // size)

    def cut(array):
        array = tf.pad(array, [(0, count * size - rows)] + [(0, 0)] * (len(array.shape) - 1))
        return tf.reshape(array, (count, size, *array.shape[1:]))

    return cut(x), cut(weights), cut(tokens)


def _chunk_losses(embedding, chunk, soft_cap):
    """Losses, predicted tokens, and a function that returns the gradients of x and embedding."""
    x, weights, tokens = chunk
    dtype = weights.dtype
    x_and_embedding = tf.cast(x, dtype), tf.cast(embedding, dtype)
    z = tf.matmul(*x_and_embedding, transpose_b=True)
    if soft_cap is not None:
        z = soft_cap * tf.tanh(z / soft_cap)
    vocabulary = tf.shape(embedding, tf.int64)[0]
    known = (tokens >= 0) & (tokens < vocabulary)
    largest = tf.reduce_max(z, axis=-1, keepdims=True)
    exponentials = tf.exp(z - largest)
    total = tf.reduce_sum(exponentials, axis=-1, keepdims=True)
    is_label = tf.range(vocabulary) == tokens[:, None]
    label_logit = tf.reduce_sum(tf.where(is_label, z, tf.zeros((), dtype)), axis=-1)
    nan = tf.constant(float("nan"), dtype)
    losses = tf.math.log(total)[:, 0] + (largest[:, 0] - label_logit)
    losses = tf.where(known, losses, nan)

    def gradients():
        given = tf.where(known, weights, nan)[:, None]
        d_z = (exponentials / total - tf.cast(is_label, dtype)) * given
        if soft_cap is not None:
            d_z = d_z * (1 - tf.square(z / soft_cap))
        d_x = tf.matmul(d_z, x_and_embedding[1])
        return tf.cast(d_x, x.dtype), tf.matmul(d_z, x_and_embedding[0], transpose_a=True)

    return losses, tf.argmax(z, axis=-1, output_type=tf.int32), gradients
