"""Recomputing a layer in the backward pass instead of keeping what is inside it."""

import keras
from keras import tree


class RecomputableLayer(keras.layers.Layer):
    """Base class of layers that `keras.RematScope` may recompute, by `recompute`."""

    def rematerialized_call(self, layer_call, *args, **kwargs):
        if super().rematerialized_call(layer_call, *args, **kwargs) is layer_call:
            return layer_call  # the `keras.RematScope` does not ask for this layer
        return recompute(layer_call)


def recompute(layer_call):
    """`layer_call`, recomputed in the backward pass, whatever it is called with.

    `keras.remat` alone serves calls with positional tensors: TensorFlow refuses keywords, JAX
    would trace flags and refuses strings. So float tensors, which carry the gradients, go in by
    position, and all else is closed over.

    On TensorFlow without XLA (`jit_compile=False`, not eager) a step may train a weight before it
    is read once more, and its gradients then are wrong. XLA, Keras's default there, and eager
    steps are safe.
    """

    def call(*args, **kwargs):
        leaves = tree.flatten((args, kwargs))
        floats = [place for place, leaf in enumerate(leaves) if _carries_gradient(leaf)]

        def of_floats(*tensors):
            filled = list(leaves)
            for place, tensor in zip(floats, tensors, strict=True):
                filled[place] = tensor
            args_again, kwargs_again = tree.pack_sequence_as((args, kwargs), filled)
            return layer_call(*args_again, **kwargs_again)

        return keras.remat(of_floats)(*(leaves[place] for place in floats))

    return call


def _carries_gradient(leaf):
    return keras.ops.is_tensor(leaf) and keras.backend.is_float_dtype(leaf.dtype)
