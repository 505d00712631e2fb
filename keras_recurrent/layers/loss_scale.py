"""Warns of float16 layers in a model whose loss is not scaled."""

import warnings
import weakref

import keras

from keras_recurrent.compat import global_state
from keras_recurrent.dispatch import BACKEND

_warned_models: weakref.WeakSet = weakref.WeakSet()


def warn_if_unscaled(layer):
    """Warns once of each compiled model that trains a float16 layer without scaling its loss."""
    context = global_state.get_global_attribute("current_call_ctx")
    model = context and context.entry_layer
    optimizer = getattr(model, "optimizer", None)
    if not optimizer or model in _warned_models:
        return
    # On JAX, Keras calls the model itself only for its output shape, before training.
    if BACKEND != "jax" and not context.get_value("training"):
        return
    if layer.variable_dtype == "float16":
        reason = (
            "stores its weights in float16, in which Adam's epsilon and second moments underflow"
        )
        advice = ""
    elif not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        reason = (
            f"computes in float16, but the optimizer of `{model.name}` does not scale the loss: "
            "small gradients become 0, and those above 65,504 infinite. Keras scales the loss only "
            'if the dtype policy of the whole model is `"mixed_float16"`'
        )
        advice = ", or pass `keras.optimizers.LossScaleOptimizer(optimizer)` to `compile`"
    else:
        return
    _warned_models.add(model)
    warnings.warn(
        f'The layer `{layer.name}` with `dtype="{layer.dtype_policy.name}"` {reason}. Use '
        f'`dtype="mixed_bfloat16"`{advice}.',
        stacklevel=2,
    )
