"""Calls of a layer inside another one that need nothing of what else Keras does around a call."""

import keras
import torch

from keras_recurrent.backends.torch._hooks import has_hooks
from keras_recurrent.compat import AutocastScope

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
        and keras.distribution.distribution() is None
    )


def call_plain(layer, inputs, **kwargs):
    """`layer.call(inputs, **kwargs)`, with weights cast as Keras casts them around a call."""
    if layer.compute_dtype == layer.variable_dtype:
        return layer.call(inputs, **kwargs)
    # The scope around may be one of a layer that does not cast.
    with AutocastScope(layer.compute_dtype if layer.autocast else None):
        return layer.call(inputs, **kwargs)
