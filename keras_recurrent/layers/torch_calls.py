"""Calls of a layer inside another one that need nothing of what else Keras does around a call."""

import keras
import torch

from keras_recurrent.backends.torch._hooks import has_hooks
from keras_recurrent.compat import AutocastScope, get_autocast_scope

_PACKAGE = "keras_recurrent."


def is_plain(outer, layer, inputs):
    """Whether `call_plain(layer, inputs)` is all there is to `layer(inputs)` in `outer`'s call.

    Layers of others may ask Keras for `training` or a mask, or do more in their `__call__`: only
    those of this package and `keras.layers.Dense` are plain, if they have the dtypes of the outer
    layer. A `DTypePolicyMap` has policies by path, which `layer` asks.
    """
    return (
        type(inputs) is torch.Tensor
        and (type(layer) is keras.layers.Dense or type(layer).__module__.startswith(_PACKAGE))
        and layer.built
        and layer.compute_dtype == outer.compute_dtype
        and layer.variable_dtype == outer.variable_dtype
        and inputs.dtype is getattr(torch, layer.compute_dtype)
        and layer.quantization_mode is None
        and layer.activity_regularizer is None
        and not has_hooks(layer)
        and "forward" not in vars(layer)  # as accelerate replaces it
        and keras.distribution.distribution() is None
    )


def call_plain(layer, inputs, **kwargs):
    """`layer.call(inputs, **kwargs)`, with weights cast as Keras casts them around a call."""
    scope = _scope_of(layer)
    if scope is None:
        return layer.call(inputs, **kwargs)
    with scope:
        return layer.call(inputs, **kwargs)


def _scope_of(layer):
    """The scope that Keras enters to call `layer`; None where it stays in the one around.

    That may be one of another dtype, as where a layer calls methods of one inside of it.
    """
    around = get_autocast_scope()
    if around is None:
        mixed = layer.compute_dtype != layer.variable_dtype
        return AutocastScope(layer.compute_dtype) if mixed else None
    if not layer.autocast:
        return None if around.dtype is None else AutocastScope(None)
    return None if around.dtype == layer.compute_dtype else AutocastScope(layer.compute_dtype)
