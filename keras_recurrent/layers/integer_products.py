"""Products of int8 tensors on JAX: exact on NVIDIA GPUs, and fast on CPUs.

XLA for NVIDIA GPUs doubles some of them (`upstream.py`). Converted to int32, they are multiplied by
another kernel of XLA. The result is the same on other platforms.

On CPUs, XLA converts all weights to int32 in each product (JAX 0.10.2). Tiles of the weights are
multiplied in float32 instead, with bit-identical results.
"""

import functools
import math

import keras

from keras_recurrent import dispatch

EXACT_MULTIPLE = 4  # XLA is exact if the contracted size is a multiple of this
TILE = 128  # rows of weights that XLA on CPUs converts at once; float32 adds up to 1,024 exactly


def exact_matmul(matmul):
    """Returns a `matmul` of Keras that is exact for int8."""

    @functools.wraps(matmul)
    def call(x1, x2):
        if _are_int8(x1, x2) and x1.shape[-1] % EXACT_MULTIPLE:
            x1 = keras.ops.cast(x1, "int32")
        elif _are_int8(x1, x2) and x2.ndim == 2 and x2.shape[0] % TILE == 0 and not _is_exported():
            import jax

            return jax.lax.platform_dependent(x1, x2, cpu=_multiply_tiles, default=matmul)
        return matmul(x1, x2)

    return call


def _multiply_tiles(x1, x2):
    """Returns the int32 product of int8 `[..., K]` and `[K, N]`; converts one tile after another.

    A tile stays in the CPU's cache, and its product in float32 is exact.
    """
    import jax
    from jax import numpy as jnp

    def add_tile(total, tiles):
        left, right = (tile.astype("float32") for tile in tiles)
        return total + jnp.matmul(left, right).astype("int32"), None

    lefts = jnp.moveaxis(x1.reshape(*x1.shape[:-1], -1, TILE), -2, 0)
    rights = x2.reshape(-1, TILE, x2.shape[1])
    total = jnp.zeros((*x1.shape[:-1], x2.shape[1]), "int32")
    return jax.lax.scan(add_tile, total, (lefts, rights))[0]


def _is_exported():
    """Returns True while a model is exported to other runtimes."""
    return dispatch.chosen_name() == dispatch.PORTABLE


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
