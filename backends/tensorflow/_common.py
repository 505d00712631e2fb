"""What the TensorFlow kernels share: dtypes, token kinds, states and shifts in time."""

import tensorflow as tf

STARTS, PADDING = 1, 2


def accumulation_dtype(*tensors):
    """float64 if any tensor is float64, else float32."""
    given = [t for t in tensors if t is not None]
    return tf.float64 if any(t.dtype == tf.float64 for t in given) else tf.float32


def as_tensors(*tensors):
    """Variables as tensors: tf.custom_gradient treats variables apart. None stays None."""
    return [None if t is None else tf.convert_to_tensor(t) for t in tensors]


def dense(gradient, output, dtype):
    """The gradient of an output, in `dtype`: it may come sparse or without its shape."""
    gradient = tf.cast(tf.convert_to_tensor(gradient), dtype)
    gradient.set_shape(output.shape)
    return gradient


def length_of(tensor):
    """T of [B, T, ...]: a number where it is known, else a tensor."""
    return tf.shape(tensor)[1] if tensor.shape[1] is None else tensor.shape[1]


def state_or_zeros(initial_state, x, dtype, slots=None):
    """The initial state in `dtype`, [B, D] or [B, slots, D]; None stands for zeros."""
    if initial_state is not None:
        return tf.cast(initial_state, dtype)
    slots = [] if slots is None else [slots]
    return tf.zeros([tf.shape(x)[0], *slots, x.shape[2]], dtype)


def kind_masks(token_kind):
    """(restart, padding), boolean [B, T, 1]; None for both when every token goes on."""
    if token_kind is None:
        return None, None
    token_kind = token_kind[:, :, None]
    return token_kind == STARTS, token_kind == PADDING


def filled(tensor, mask, value):
    """`tensor` with `value` where `mask` is set; no mask, no change."""
    if mask is None:
        return tensor
    result = tf.where(mask, tf.constant(value, tensor.dtype), tensor)
    result.set_shape(tensor.shape)  # which tf.where forgets where the batch is unknown
    return result


def previous(tensor, first):
    """tensor_{t-1}, with `first` before the first token."""
    return tf.concat([first[:, None], tensor[:, :-1]], axis=1)


def following(tensor, last):
    """tensor_{t+1}, with `last` after the last token."""
    return tf.concat([tensor[:, 1:], last[:, None]], axis=1)


def chunked(tensor, size, filler):
    """[B, T, D] as [B, T / size, size, D]; the last chunk is filled up."""
    missing = -length_of(tensor) % size
    if tensor.shape[1] is None or missing:
        filler = tf.constant(filler, tensor.dtype)
        tensor = tf.pad(tensor, [[0, 0], [0, missing], [0, 0]], constant_values=filler)
    return tf.reshape(
        tensor, [tf.shape(tensor)[0], length_of(tensor) // size, size, tensor.shape[2]]
    )


def total(tensor):
    """The sum over batch and time, in two stages: in one, TensorFlow adds up token by token."""
    return tf.reduce_sum(tf.reduce_sum(chunked(tensor, 32, 0), axis=2), axis=[0, 1])
