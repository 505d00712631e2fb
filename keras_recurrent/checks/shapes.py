"""Shapes, some of which are partially known."""

import keras
from keras import ops


def fits(shape, wanted):
    """Returns True if two shapes can be equal; None matches any size."""
    if len(shape) != len(wanted):
        return False
    for a, b in zip(shape, wanted, strict=True):
        if a is not None and b is not None and a != b:
            return False
    return True


def check_rank_known(owner, name, tensor):
    """Raises an error unless `tensor` is None, or a tensor with a known number of dimensions.

    Raises:
        ValueError: names the argument.
    """
    if tensor is not None and not hasattr(tensor, "shape"):
        raise ValueError(
            f"`{owner}`: `{name}` must be a tensor or an array; got {type(tensor).__name__}."
        )
    if getattr(getattr(tensor, "shape", None), "rank", 0) is None:
        raise ValueError(
            f"`{owner}`: `{name}` must have a known number of dimensions, whose sizes may be "
            "unknown; got a tensor of unknown shape. Give the `tf.TensorSpec` or the dataset a "
            "shape such as [None, None], or call `set_shape` on the tensor."
        )


def reshape(tensor, shape):
    """Reshapes a tensor: on torch, `keras.ops.reshape` takes longer than a small matrix product."""
    is_native = keras.config.backend() == "torch" and not isinstance(tensor, keras.KerasTensor)
    return tensor.reshape(shape) if is_native else ops.reshape(tensor, shape)
