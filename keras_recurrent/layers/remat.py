"""Recomputing a layer in the backward pass instead of keeping what is inside it."""

import contextlib

import keras
from keras import tree

from keras_recurrent.checks.shapes import check_rank_known
from keras_recurrent.compat import AutocastScope, get_autocast_scope, get_current_remat_mode
from keras_recurrent.devices.torch_processes import check_not_sharded
from keras_recurrent.dispatch import BACKEND, chosen_name, implementation

if BACKEND == "tensorflow":
    from keras_recurrent.backends.tensorflow import _recompute
elif BACKEND == "torch":
    from keras_recurrent.layers.torch_calls import call_plain, is_plain


class RecomputableLayer(keras.layers.Layer):
    """Base class of layers that `keras.RematScope` may recompute, by `recompute`."""

    def __call__(self, *args, **kwargs):
        # One override for all that comes before Keras's own: torch's compiler goes through a frame
        # of this stack by a dozen of its own, and deep models come close to Python's limit.
        return super().__call__(*args, **self.prepare_call(args, kwargs))

    def prepare_call(self, args, kwargs):
        """Check the arguments of a call before Keras reads them; returns `kwargs`."""
        if BACKEND == "torch":
            check_not_sharded(self)
        if args:  # Keras itself would ask for the length of the shape
            check_rank_known(type(self).__name__, "inputs", args[0])
        return kwargs

    def inner(self, layer, inputs, **kwargs):
        """`layer(inputs, **kwargs)`, for a layer inside of this one.

        On torch each call of a layer by Keras takes the host 50 microseconds, which launches a
        product of matrices in 10, and a block has twelve such calls: steps of few tokens waited
        for it. A layer that needs nothing of that is called without.
        """
        if is_called_directly(self, layer, inputs):
            return call_plain(layer, inputs, **kwargs)
        return layer(inputs, **kwargs)

    def rematerialized_call(self, layer_call, *args, **kwargs):
        if super().rematerialized_call(layer_call, *args, **kwargs) is layer_call:
            return layer_call  # made without a `keras.RematScope`, or one for other layers
        return recompute(layer_call)


def is_called_directly(outer, layer, inputs):
    """Returns True if `inner` calls `layer` without Keras's `__call__`."""
    return BACKEND == "torch" and not _recomputes(layer) and is_plain(outer, layer, inputs)


def _recomputes(layer):
    """Whether a `keras.RematScope` that may recompute was open when the layer was made."""
    remat = layer._remat_mode
    return remat is not None and remat.mode is not None


def no_further_remat():
    """A scope in which a layer makes its sublayers, so that they keep what they compute.

    A layer takes up the `keras.RematScope` in which it is made. Under one that recomputes the outer
    layer, its sublayers would otherwise be recomputed a second time, each by itself. One that names
    layers may name sublayers, too.
    """
    current = get_current_remat_mode()
    if current is not None and current.mode == "list_of_layers":
        return contextlib.nullcontext()
    return keras.RematScope(mode=None)


def recompute(layer_call):
    """A function that computes what `layer_call` does, and computes it again for the gradient.

    `keras.remat` alone serves calls with positional tensors: TensorFlow refuses keywords, JAX
    would trace flags and refuses strings. So float tensors, which carry the gradients, go in by
    position, and all else is closed over. A graph of TensorFlow without XLA could train a weight
    before the recomputation reads it: there, gradients wait for all that is recomputed. On torch
    and TensorFlow it is computed again when Keras's call is over, on GPUs of torch in another
    thread, and casts weights and chooses implementations as it did.
    """

    def call(*args, **kwargs):
        scope, chosen = get_autocast_scope(), chosen_name()
        leaves = tree.flatten((args, kwargs))
        floats = [place for place, leaf in enumerate(leaves) if _carries_gradient(leaf)]

        def of_floats(*tensors):
            filled = list(leaves)
            for place, tensor in zip(floats, tensors, strict=True):
                filled[place] = tensor
            args_again, kwargs_again = tree.pack_sequence_as((args, kwargs), filled)
            casts = contextlib.nullcontext() if scope is None else AutocastScope(scope.dtype)
            # Entered only where it is missing, so that nothing is set while a compiler traces.
            named = contextlib.nullcontext() if chosen == chosen_name() else implementation(chosen)
            with casts, named:
                outputs = layer_call(*args_again, **kwargs_again)
            if BACKEND != "tensorflow":
                return outputs
            ordered = _recompute.gradients_after(*tree.flatten(outputs))
            return tree.pack_sequence_as(outputs, ordered)

        return keras.remat(of_floats)(*(leaves[place] for place in floats))

    return call


def _carries_gradient(leaf):
    return keras.ops.is_tensor(leaf) and keras.backend.is_float_dtype(leaf.dtype)
