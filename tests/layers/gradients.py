"""Gradients of functions of tensors on the current backend, with NumPy arrays in and out."""

import keras
import numpy as np

from tests.layers.table import numpy

BACKEND = keras.config.backend()


def gradients(function, arrays):
    """Returns the gradient of a scalar `function` by each of its nested float32 arrays."""
    tensors = keras.tree.map_structure(lambda a: keras.ops.convert_to_tensor(a, "float32"), arrays)
    return numpy(_gradients(function, tensors))


def assert_gradients_close(found, expected):
    """Asserts that nested gradients are equal up to rounding of their largest numbers."""
    for f, e in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-5 * (1 + np.abs(e).max(initial=0)))


def call_with(layer, values, *args, **kwargs):
    """Calls a layer with `values` as its trainable weights."""
    mapping = list(zip(layer.trainable_variables, values, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        return layer(*args, **kwargs)


if BACKEND == "jax":
    import jax

    def _gradients(function, tensors):
        return jax.jit(jax.grad(function))(tensors)

elif BACKEND == "torch":
    import torch

    def _gradients(function, tensors):
        flat = [t.detach().clone().requires_grad_() for t in keras.tree.flatten(tensors)]
        value = function(keras.tree.pack_sequence_as(tensors, flat))
        return keras.tree.pack_sequence_as(tensors, torch.autograd.grad(value, flat))

else:
    import tensorflow as tf

    def _gradients(function, tensors):
        flat = keras.tree.flatten(tensors)
        with tf.GradientTape() as tape:
            tape.watch(flat)
            value = function(tensors)
        return keras.tree.pack_sequence_as(tensors, tape.gradient(value, flat))
