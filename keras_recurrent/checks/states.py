"""Checks of states, masks and segments that are given to a call."""

from keras_recurrent.checks.arguments import check_positive_integer, check_tensor
from keras_recurrent.checks.dtypes import check_dtype, dtype_of
from keras_recurrent.checks.shapes import check_rank_known, fits


def one_state(state):
    """A state out of a list of it alone, as Keras's layers over time hand theirs on."""
    if isinstance(state, (list, tuple)) and len(state) == 1 and isinstance(state[0], dict):
        return state[0]
    return state


def check_sizes_of_state(batch_size, max_length):
    """Raise for numbers that are no integers from 1 on; tensors, as in a graph, are not checked."""
    for name, number in (("batch_size", batch_size), ("max_length", max_length)):
        if isinstance(number, (int, float, str)):
            check_positive_integer(name, number)


def check_per_token(owner, name, tensor, shape):
    """Raise for a mask or for segments, if there are any, that are not one number a token."""
    if tensor is None:
        return
    check_tensor(name, tensor)
    check_rank_known(owner, name, tensor)
    if not fits(tensor.shape, shape):
        mend = ""
        if name == "mask" and len(tensor.shape) == 3:  # `TimeDistributed` hands on what it got
            mend = " Of the mask of each token's parts, `keras.ops.any(mask, axis=-1)` makes one."
        raise ValueError(
            f"`{name}` must have the shape [batch, time] of the inputs, {tuple(shape)}; got "
            f"{tuple(tensor.shape)}.{mend}"
        )
    # A mask of numbers to add, 0 and -inf, would mean the contrary as a boolean.
    check_dtype(owner, name, dtype_of(tensor))


def check_state(state, spec, path):
    """Raise for a state of another structure or shape than `spec`; `path` is its name in errors."""
    if isinstance(spec, tuple):
        if not isinstance(state, (tuple, list)) or len(state) != len(spec):
            got = f"one of {len(state)}" if isinstance(state, (tuple, list)) else _kind(state)
            raise ValueError(
                f"`{path}` must be a tuple of the length {len(spec)}, as "
                f"`get_initial_state(batch_size)` makes it; got {got}."
            )
        for i, part in enumerate(spec):
            check_state(state[i], part, f"{path}[{i}]")
        return
    if isinstance(spec, dict):
        if not isinstance(state, dict) or set(state) != set(spec):
            raise ValueError(
                f"`{path}` must be a dict of {sorted(spec)}, as `get_initial_state(batch_size)` "
                f"makes it and a call returns it; got {_kind(state)}."
            )
        for name, part in spec.items():
            check_state(state[name], part, f"{path}[{name!r}]")
        return
    check_tensor(path, state)
    if not fits(state.shape, spec.shape):
        raise ValueError(
            f"`{path}` must have the shape {tuple(spec.shape)}; got {tuple(state.shape)}. A state "
            "belongs to the layer and the batch size that it came from."
        )


def _kind(state):
    return f"a dict of {sorted(state)}" if isinstance(state, dict) else type(state).__name__
