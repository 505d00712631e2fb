"""Exact products of int8 tensors on JAX with NVIDIA GPUs.

XLA doubles some of them (`upstream.py`). Converted to int32, they are multiplied by another kernel
of XLA. The result is the same on other platforms.
"""

import functools
import math

import keras

EXACT_MULTIPLE = 4  # XLA is exact if the contracted size is a multiple of this


def exact_matmul(matmul):
    """Returns a `matmul` of Keras that is exact for int8."""

    @functools.wraps(matmul)
    def call(x1, x2):
        if _are_int8(x1, x2) and x1.shape[-1] % EXACT_MULTIPLE:
            x1 = keras.ops.cast(x1, "int32")
        return matmul(x1, x2)

    return call


def exact_einsum(einsum):
    """Returns an `einsum` of Keras that is exact for int8."""

    @functools.wraps(einsum)
    def call(subscripts, *operands, **kwargs):
        if _are_int8(*operands) and contracted_size(subscripts, *operands) % EXACT_MULTIPLE:
            operands = (keras.ops.cast(operands[0], "int32"), *operands[1:])
        return einsum(subscripts, *operands, **kwargs)

    return call


def _are_int8(*operands):
    return len(operands) == 2 and all(str(getattr(x, "dtype", "")) == "int8" for x in operands)


def contracted_size(subscripts, x1, x2):
    """Returns the number of products in each sum of an `einsum` of two tensors."""
    inputs, _, output = subscripts.replace(" ", "").partition("->")
    left, right = inputs.split(",")
    contracted = set(left) & set(right) - set(output) - {"."}
    return math.prod(x1.shape[_axis(left, label)] for label in contracted)


def _axis(labels, label):
    """The axis of a label; negative after an ellipsis, which matches any number of axes."""
    before, ellipsis, after = labels.partition("...")
    return after.index(label) - len(after) if ellipsis and label in after else before.index(label)
