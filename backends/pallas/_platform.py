"""Availability of the Pallas functions that the kernels use in the installed JAX.

`keras_recurrent/dispatch.py` imports this file with any JAX: it does not import Pallas itself.
"""

import functools
import importlib

import jax

# All names of `jax.experimental.pallas` that this folder uses; a test keeps the list complete.
PALLAS_NAMES = (
    "BlockSpec",
    "cdiv",
    "ds",
    "multiple_of",
    "pallas_call",
    "program_id",
    "tpu.CompilerParams",
    "tpu.SMEM",
    "tpu.VMEM",
    "tpu.get_tpu_info",
    "tpu.is_tpu_device",
    "tpu.roll",
    "when",
)


@functools.cache
def unavailable():
    """Reason the kernels cannot be built with the installed JAX, or None."""
    for name in PALLAS_NAMES:
        module, _, attribute = f"jax.experimental.pallas.{name}".rpartition(".")
        try:
            found = hasattr(importlib.import_module(module), attribute)
        except ImportError as error:
            return f"JAX {jax.__version__} cannot import `{module}`: {error}"
        if not found:
            return f"needs `{module}.{attribute}`, which JAX {jax.__version__} does not have"
    return None
