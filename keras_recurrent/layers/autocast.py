"""The dtype in which a layer that is called without Keras's `__call__` reads its weights."""

import contextlib

from keras_recurrent.compat import AutocastScope, get_autocast_scope


def weights_scope(layer):
    """The context in which Keras calls `layer`: the dtype that weights are cast to.

    The enclosing scope may have another dtype, as where a layer calls a method of an inner layer.
    """
    dtype, enclosing = layer.compute_dtype, get_autocast_scope()
    if enclosing is None:
        is_needed = dtype != layer.variable_dtype
    else:
        dtype = dtype if layer.autocast else None
        is_needed = enclosing.dtype != dtype
    return AutocastScope(dtype) if is_needed else contextlib.nullcontext()
