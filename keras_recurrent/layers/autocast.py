"""The autocast scope of a layer that is called without Keras's `__call__`."""

import contextlib

from keras_recurrent.compat import AutocastScope, get_autocast_scope


def weights_scope(layer):
    """Returns the autocast scope that Keras's `__call__` would enter for `layer`.

    The enclosing scope may have another dtype, as where a layer calls a method of an inner layer.
    """
    dtype, enclosing = layer.compute_dtype, get_autocast_scope()
    if enclosing is None:
        is_needed = dtype != layer.variable_dtype
    else:
        dtype = dtype if layer.autocast else None
        is_needed = enclosing.dtype != dtype
    return AutocastScope(dtype) if is_needed else contextlib.nullcontext()
