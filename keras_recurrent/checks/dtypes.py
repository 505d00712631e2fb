"""Accepted dtypes of arguments, and dtypes of sums and weights."""

import contextlib
import math

import keras
import numpy as np

from keras_recurrent.compat import AutocastScope, get_autocast_scope

FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGER_DTYPES = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
INTEGERS = (
    "segment_ids",
    "previous_segment_id",
    "initial_state['position']",
    "tokens",
    "position",
    "positions",
    "count",
)


def dtype_of(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def item_size(array):
    """Returns the bytes of an element of an array, a tensor or a variable."""
    return np.dtype(dtype_of(array)).itemsize


def bytes_of(array):
    """Returns the size of an array, a tensor or a variable in bytes."""
    return math.prod(array.shape) * item_size(array)


def accumulation_dtype(*dtypes):
    """Returns the dtype of states and sums: float64 if any of these is, else float32."""
    return "float64" if "float64" in dtypes else "float32"


def sum_dtype(*tensors):
    """Returns the `accumulation_dtype` of tensors, some of which may be None."""
    return accumulation_dtype(*(dtype_of(t) for t in tensors if t is not None))


def weights_scope(layer):
    """Returns the autocast scope that Keras's `__call__` would enter for `layer`.

    The enclosing scope may have another dtype, as where a layer calls a method of an inner layer.
    """
    dtype, enclosing = layer.compute_dtype, get_autocast_scope()
    if enclosing is None:
        is_needed = dtype != layer.variable_dtype
    else:
        dtype = dtype if layer.autocast else None
        is_needed = enclosing.dtype != dtype
    return AutocastScope(dtype) if is_needed else contextlib.nullcontext()


def accepted_dtypes(name):
    """Returns the dtypes that an argument of this name may have, as a frozenset and in words."""
    good: tuple[str, ...]
    if name in ("mask", "padding_mask"):
        good = ("bool", *_INTEGER_DTYPES)
        wanted = "boolean, True at real tokens, or integers, 0 at padding"
    elif name == "token_kind":
        good, wanted = ("int8",), "int8, as `keras_recurrent.ops.token_kind` returns it"
    elif name in INTEGERS:
        good, wanted = _INTEGER_DTYPES, "integers"
    else:
        good, wanted = FLOATS, f"one of {', '.join(FLOATS)}"
    return frozenset(good), wanted


def check_dtype(operation, name, dtype):
    good, wanted = accepted_dtypes(name)
    if dtype not in good:
        raise dtype_error(operation, name, wanted, dtype)


def dtype_error(operation, name, wanted, dtype):
    return ValueError(f"`{operation}`: `{name}` must be {wanted}; got {dtype}. Cast it first.")
