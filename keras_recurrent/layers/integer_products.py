"""Exact products of int8 tensors on JAX with NVIDIA GPUs."""

import functools
import math

import keras

from keras_recurrent import compat
from keras_recurrent.dispatch import BACKEND

EXACT_MULTIPLE = 4  # XLA is exact if the contracted size is a multiple of this


def install():
    """Replaces Keras's `matmul` and `einsum` on JAX by versions that are exact for int8.

    Where the number of contracted elements is not a multiple of 4, XLA for NVIDIA GPUs doubles the
    product of two int8 tensors (H100, JAX 0.11.2). Keras multiplies int8 tensors in layers after
    `quantize("int8")`. Converted to int32, they are multiplied by another kernel of XLA. The result
    is the same on other platforms.
    """
    if BACKEND != "jax":
        return
    compat.replace_function(compat.JAX_OPERATIONS, "matmul", _exact_matmul)
    compat.replace_function(compat.JAX_OPERATIONS, "einsum", _exact_einsum)


def _exact_matmul(matmul):
    @functools.wraps(matmul)
    def call(x1, x2):
        if _are_int8(x1, x2) and x1.shape[-1] % EXACT_MULTIPLE:
            x1 = keras.ops.cast(x1, "int32")
        return matmul(x1, x2)

    return call


def _exact_einsum(einsum):
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
