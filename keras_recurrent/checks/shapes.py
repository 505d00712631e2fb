"""Shapes, some of which are partially known, and checks of states, masks and segments."""

import keras
from keras import ops

from keras_recurrent.checks.arguments import check_positive_integer, check_tensor
from keras_recurrent.checks.dtypes import check_dtype, dtype_of


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


def one_state(state):
    """Returns the state in a list of one state, as `keras.layers.Bidirectional` passes it."""
    if isinstance(state, (list, tuple)) and len(state) == 1 and isinstance(state[0], dict):
        return state[0]
    return state


def check_sizes_of_state(batch_size, max_length):
    """Raises an error for sizes that are not integers of at least 1.

    Tensors, which are sizes in a graph, are not checked.
    """
    for name, number in (("batch_size", batch_size), ("max_length", max_length)):
        if isinstance(number, (int, float, str)):
            check_positive_integer(name, number)


def check_per_token(owner, name, tensor, shape):
    """Raises an error unless a mask or segments have one number per token."""
    check_tensor(name, tensor)
    check_rank_known(owner, name, tensor)
    if not fits(tensor.shape, shape):
        advice = ""
        if name == "mask" and len(tensor.shape) == 3:  # `TimeDistributed` passes its input mask
            advice = " Reduce a mask of the parts of each token by `keras.ops.any(mask, axis=-1)`."
        raise ValueError(
            f"`{name}` must have the shape [batch, time] of the inputs, {tuple(shape)}; got "
            f"{tuple(tensor.shape)}.{advice}"
        )
    # As a boolean, an additive mask of 0 and -inf would have the opposite meaning.
    check_dtype(owner, name, dtype_of(tensor))


def check_state(state, spec, path):
    """Raises an error for a state of another structure or shape than `spec`.

    path: string, the name of the state in errors.
    """
    if isinstance(spec, tuple):
        if not isinstance(state, (tuple, list)) or len(state) != len(spec):
            got = f"one of {len(state)}" if isinstance(state, (tuple, list)) else _kind(state)
            raise ValueError(
                f"`{path}` must be a tuple of length {len(spec)}, as returned by "
                f"`get_initial_state(batch_size)`; got {got}."
            )
        for i, part in enumerate(spec):
            check_state(state[i], part, f"{path}[{i}]")
        return
    if isinstance(spec, dict):
        if not isinstance(state, dict) or set(state) != set(spec):
            raise ValueError(
                f"`{path}` must be a dict of {sorted(spec)}, as returned by "
                f"`get_initial_state(batch_size)` and by a call; got {_kind(state)}."
            )
        for name, part in spec.items():
            check_state(state[name], part, f"{path}[{name!r}]")
        return
    check_tensor(path, state)
    if not fits(state.shape, spec.shape):
        raise ValueError(
            f"`{path}` must have the shape {tuple(spec.shape)}; got {tuple(state.shape)}. Pass a "
            "state of the same layer and batch size."
        )


def _kind(state):
    return f"a dict of {sorted(state)}" if isinstance(state, dict) else type(state).__name__
