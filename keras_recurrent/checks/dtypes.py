"""Dtypes of tensors: which are accepted, and which a sum has."""

import math

import keras
import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = (
    "segment_ids",
    "previous_segment_id",
    "initial_state['position']",
    "tokens",
    "position",
    "positions",
)


def dtype_of(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def bytes_of(array):
    """The bytes of an array, a tensor or a variable."""
    return math.prod(array.shape) * np.dtype(dtype_of(array)).itemsize


def accumulation_dtype(*dtypes):
    """The dtype of states and sums: float64 if any of these is, else float32."""
    return "float64" if "float64" in dtypes else "float32"


def dtype_of_sums(tensors):
    """The `accumulation_dtype` of a dict of tensors or Nones."""
    return accumulation_dtype(*(dtype_of(t) for t in tensors.values() if t is not None))


def check_dtype(operation, name, dtype, int8=False):
    if int8:
        good, wanted = dtype == "int8", "int8"
    elif name in ("mask", "padding_mask"):
        good = dtype == "bool" or "int" in dtype
        wanted = "boolean, True at real tokens, or integers, 0 at padding"
    elif name == "token_kind":
        good, wanted = dtype == "int8", "int8, as `keras_recurrent.ops.token_kind` returns it"
    elif name in INTEGERS:
        good, wanted = "int" in dtype, "integers"
    else:
        good, wanted = dtype in FLOATS, f"one of {', '.join(FLOATS)}"
    if not good:
        raise ValueError(f"`{operation}`: `{name}` must be {wanted}; got {dtype}. Cast it first.")
