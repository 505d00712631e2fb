"""Lazy imports of Pallas and its TPU module, as `pl` and `pltpu`.

They are experimental in JAX, and names in them change. So they are imported only when a kernel is
built: if a name is missing, `import keras_recurrent` works and plain JAX runs.
"""

import importlib


class _LazyModule:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        return getattr(importlib.import_module(self._name), attribute)


pl = _LazyModule("jax.experimental.pallas")
pltpu = _LazyModule("jax.experimental.pallas.tpu")
