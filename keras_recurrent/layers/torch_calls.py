"""Which calls of a layer inside another one need nothing of what Keras does around a call."""

import keras
import torch

from keras_recurrent.backends.torch._hooks import has_hooks

_PACKAGE = "keras_recurrent."


def is_plain(outer, layer, inputs):
    """Whether `layer.call(inputs)` is all there is to `layer(inputs)` inside of `outer`'s call.

    Layers of others may ask Keras for `training` or a mask, or do more in their `__call__`: only
    those of this package and `keras.layers.Dense` are plain. With the dtypes of the outer layer
    they compute in its autocast scope. A `DTypePolicyMap` has policies by path, which `layer` asks.
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
