"""Helpers shared by the operations in TensorFlow."""

import tensorflow as tf

from ..constants import PADDING, STARTS


def accumulation_dtype(*tensors):
    """The dtype of states and sums: float64 if any tensor is float64, else float32."""
    given = [t for t in tensors if t is not None]
    return tf.float64 if any(t.dtype == tf.float64 for t in given) else tf.float32


def as_tensors(*tensors):
    """Variables as tensors: `tf.custom_gradient` treats variables differently. None stays None."""
    return [None if t is None else tf.convert_to_tensor(t) for t in tensors]


def dense_gradient(gradient, output, dtype):
    """The gradient of an output in `dtype`, dense and with its shape, which it may lack."""
    gradient = tf.cast(tf.convert_to_tensor(gradient), dtype)
    gradient.set_shape(output.shape)
    return gradient


def length_of(tensor):
    """T of [B, T, ...]: an integer if it is known, else a tensor."""
    return tf.shape(tensor)[1] if tensor.shape[1] is None else tensor.shape[1]


def state_or_zeros(initial_state, shape, dtype):
    """The initial state in `dtype`; None means zeros."""
    return tf.zeros(shape, dtype) if initial_state is None else tf.cast(initial_state, dtype)


def kind_masks(token_kind):
    """Boolean masks (starts, padding) [B, T]; both None if all tokens continue a document."""
    if token_kind is None:
        return None, None
    return token_kind == STARTS, token_kind == PADDING


def filled(tensor, mask, value):
    """`tensor` [B, T, ...] with `value` where `mask` [B, T] is set; mask None changes nothing."""
    if mask is None:
        return tensor
    for _ in range(len(tensor.shape) - len(mask.shape)):
        mask = mask[..., None]
    result = tf.where(mask, tf.constant(value, tensor.dtype), tensor)
    result.set_shape(tensor.shape)  # tf.where loses it if the batch is unknown
    return result


def differentiate(tape, results, tensors, d_results):
    """The gradients of tensors.

    In forward mode, where nothing is recorded and gradients are not used, they are zeros.
    """
    return tape.gradient(results, tensors, d_results, unconnected_gradients="zero")


def recompute(function, *tensors):
    """Returns `function(*tensors)`, a tuple.

    The backward pass computes it once more and differentiates it, so that the tensors are the only
    residuals.
    """

    @tf.custom_gradient
    def run(*tensors):
        results = function(*tensors)

        def gradient(*d_results):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                again = function(*tensors)
            pairs = zip(d_results, again, strict=True)
            dense = [dense_gradient(d, y, y.dtype) for d, y in pairs]
            return differentiate(tape, again, tensors, dense)

        return results, gradient

    return run(*tensors)


def apply_linear(function, transpose, x):
    """`function(x)`, a linear function whose gradient is `transpose`."""

    @tf.custom_gradient
    def run(x):
        return function(x), transpose

    return run(x)


def move(x, index):
    """x[b, index[b, i]]; x: [B, T, ...]; index: [B, I]."""
    length = length_of(x)
    if not x.dtype.is_floating:
        return _gather(x, index)
    return apply_linear(lambda x: _gather(x, index), lambda d: scatter(d, index, length), x)


def _gather(x, index):
    moved = tf.gather(x, index, batch_dims=1)
    moved.set_shape([*index.shape, *x.shape[2:]])  # lost if the batch is unknown
    return moved


def scatter(x, index, length):
    """The transpose of `move`: x[b, i] at index[b, i] of [B, length, ...], and zeros elsewhere."""
    batch = tf.shape(x)[0]
    row = tf.broadcast_to(tf.range(batch)[:, None], tf.shape(index))
    return tf.scatter_nd(tf.stack([row, index], axis=-1), x, [batch, length, *x.shape[2:]])


def take(x, index, valid):
    """x[b, index[b, i]] where `valid`, else 0; x: [B, T, ...]; index, valid: [B, I]."""
    return filled(_gather(x, index), ~valid, 0)


def sum_over_tokens(x):
    """The sum [D] of x [B, T, D], as a tree; `tf.reduce_sum` would add token by token."""
    levels = 0
    while levels < 3 if x.shape[1] is None else x.shape[1] > 8:
        missing = -length_of(x) % 8
        if x.shape[1] is None or missing:
            x = tf.pad(x, [[0, 0], [0, missing], [0, 0]])
        x = tf.reshape(x, [tf.shape(x)[0], length_of(x) // 8, 8, x.shape[2]])
        x, levels = tf.reduce_sum(x, axis=2), levels + 1
    return tf.reduce_sum(x, axis=[0, 1])


@tf.custom_gradient
def scaled(row, x):
    """row * x for row [D] and x [B, T, D], whose gradient has an accurate sum over tokens."""
    return row * x, lambda d: (sum_over_tokens(d * x), d * row)


@tf.custom_gradient
def sigmoid(z):
    """σ(z) with an accurate gradient."""
    # On a CPU, the error of `tf.sigmoid` is up to six units in the last place; the error of this
    # quotient is little more than two. Graphs turn a constant divided by a tensor into an
    # approximate reciprocal, which CPUs round to 1 - 2^-24 where σ is 1, but keep a quotient of
    # tensors.
    e = tf.exp(-tf.abs(z))
    positive, one = z >= 0, tf.ones_like(e)
    s = tf.where(positive, one, e) / (1 + e)

    def gradient(d_s):
        """Uses σ(-z), which TensorFlow would compute as 1 - σ(z), losing digits for z > 0."""
        return d_s * s * (tf.where(positive, e, one) / (1 + e))

    return s, gradient
