"""Rematerialization: recomputes a layer in the backward pass instead of saving activations."""

import contextlib

import keras
from keras import tree

from keras_recurrent.compat import AutocastScope, get_autocast_scope, get_current_remat_mode
from keras_recurrent.dispatch import BACKEND, chosen_name, implementation

if BACKEND == "tensorflow":
    from keras_recurrent.backends.tensorflow import _recompute


def no_further_remat():
    """Returns a scope in which a layer creates sublayers that are not rematerialized separately.

    A layer uses the `keras.RematScope` in which it is created. If that scope recomputes the outer
    layer, the sublayers would be recomputed twice. A scope that lists layers stays in force,
    because it may list sublayers.
    """
    current = get_current_remat_mode()
    if current is not None and current.mode == "list_of_layers":
        return contextlib.nullcontext()
    return keras.RematScope(mode=None)


def recompute(layer_call):
    """Wraps `layer_call` so that it is recomputed in the backward pass.

    `keras.remat` supports only calls with positional tensors: TensorFlow rejects keywords, and JAX
    traces flags and rejects strings. Therefore, float tensors, which carry the gradients, are
    passed by position, and all other arguments are captured by a closure.

    A TensorFlow graph without XLA could update a weight before the recomputation reads it: there,
    gradients depend on all recomputed outputs. On torch and TensorFlow, the recomputation runs
    after Keras's call has returned, on torch GPUs in another thread. It restores the autocast scope
    and the chosen implementation of the call.
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
            # Entered only if needed, so that nothing is set while a compiler traces.
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
