"""Rematerialization: recomputes a layer in the backward pass instead of saving activations."""

import contextlib

import keras
from keras import tree

from keras_recurrent.checks.dtypes import accumulation_dtype
from keras_recurrent.checks.shapes import check_rank_known
from keras_recurrent.compat import AutocastScope, get_autocast_scope, get_current_remat_mode
from keras_recurrent.devices.torch_processes import RejectsFullyShard
from keras_recurrent.dispatch import BACKEND, chosen_name, implementation
from keras_recurrent.layers import gru_arguments
from keras_recurrent.layers.inner_calls import InnerCalls
from keras_recurrent.layers.loss_scale import warn_if_unscaled
from keras_recurrent.layers.saved_quantization import SavedQuantization

if BACKEND == "tensorflow":
    from keras_recurrent.backends.tensorflow import _recompute


class RecomputableLayer(SavedQuantization, InnerCalls, RejectsFullyShard, keras.layers.Layer):
    """Base class of layers: checks of their arguments, and `keras.RematScope` by `recompute`."""

    # {name: alternative} of arguments of `keras.layers.GRU` that the layer does not support.
    gru_alternatives = {"units": gru_arguments.ALTERNATIVES["units"]}

    def __new__(cls, *args, **kwargs):
        gru_arguments.check_constructor_arguments(cls, args, kwargs)
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, **kwargs):
        owner = type(self).__name__
        kwargs = gru_arguments.without_gru_arguments(owner, kwargs, self.gru_alternatives)
        gru_arguments.check_known_arguments(type(self), kwargs)
        super().__init__(**kwargs)

    def __call__(self, *args, **kwargs):
        # A single override of `__call__`: torch's compiler adds a dozen frames for each frame of
        # this stack, and deep models approach Python's recursion limit.
        return super().__call__(*args, **self.prepare_call(args, kwargs))

    def prepare_call(self, args, kwargs):
        """Checks the arguments of a call before Keras reads them; returns `kwargs`."""
        if args:  # Keras reads the length of the shape
            check_rank_known(type(self).__name__, "inputs", args[0])
        if self.compute_dtype == "float16":
            warn_if_unscaled(self)
        return kwargs

    def get_config(self):
        """Returns the arguments of the constructor that are attributes of the same name."""
        config = super().get_config()
        for name in gru_arguments.constructor_arguments(type(self)):
            if hasattr(self, name) and name not in config:
                config[name] = _serialize_argument(name, getattr(self, name))
        return config

    @property
    def state_dtype(self):
        """The dtype of states, angles and the weights of decays: at least float32."""
        return accumulation_dtype(self.compute_dtype)

    def add_state_weight(self, name, shape, initializer, weight_decay=True):
        """Adds a weight in `state_dtype`, which Keras does not cast to the compute dtype.

        `weight_decay=False`, for weights of decays: `exclude_from_weight_decay` excludes it.
        """
        dtype = self.state_dtype
        weight = self.add_weight(shape, initializer, dtype, autocast=False, name=name)
        weight.weight_decay = weight_decay
        return weight

    def rematerialized_call(self, layer_call, *args, **kwargs):
        if super().rematerialized_call(layer_call, *args, **kwargs) is layer_call:
            return layer_call  # created outside a `keras.RematScope`, or in one for other layers
        return recompute(layer_call)


def _serialize_argument(name, value):
    """Returns an argument of a layer for its configuration: a number, string or dictionary."""
    if not callable(value):
        return value
    if name.endswith("activation"):
        return keras.activations.serialize(value)
    return keras.saving.serialize_keras_object(value)


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
