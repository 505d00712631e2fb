"""Zeros instead of random numbers, for weights that are read from files next.

Random numbers of a large model take minutes on a CPU, and temporary arrays of its size.
"""

import contextlib
import functools
import threading

import keras

_CLASSES = (
    keras.initializers.OrthogonalInitializer,
    keras.initializers.RandomNormal,
    keras.initializers.RandomUniform,
    keras.initializers.TruncatedNormal,
    keras.initializers.VarianceScaling,
)


class _Scope(threading.local):
    active = False


_scope, _lock = _Scope(), threading.Lock()


@contextlib.contextmanager
def zero_initialization():
    """Context manager in which Keras's random initializers return zeros in this thread.

    It may be nested.
    """
    if _scope.active:
        yield
        return
    with _lock:
        original = {cls: cls.__call__ for cls in _CLASSES}
        for cls, call in original.items():
            cls.__call__ = _zeros_in_scope(call)
        _scope.active = True
        try:
            yield
        finally:
            _scope.active = False
            for cls, call in original.items():
                cls.__call__ = call


def _zeros_in_scope(call):
    @functools.wraps(call)
    def initialize(self, shape, dtype=None, **kwargs):
        if _scope.active:
            return keras.ops.zeros(shape, dtype or keras.config.floatx())
        return call(self, shape, dtype, **kwargs)

    return initialize
