"""`pl` and `pltpu`, Pallas and its part for TPU, as every file of this folder imports them.

JAX calls them experimental and renames things in them. So they are imported only when a kernel is
built: whatever is missing there, `import keras_recurrent` works and plain JAX runs.
"""

import importlib


class _LazyModule:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        return getattr(importlib.import_module(self._name), attribute)


pl = _LazyModule("jax.experimental.pallas")
pltpu = _LazyModule("jax.experimental.pallas.tpu")
