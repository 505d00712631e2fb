"""Whether the installed JAX has what the kernels use.

`keras_recurrent/dispatch.py` imports this file whatever JAX has: it reads nothing of Pallas.
"""

import functools
import importlib

import jax

# All that the files of this folder read of `jax.experimental.pallas`; a test keeps it complete.
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
    """Why no kernel of this folder can be built with the installed JAX; None if they can."""
    for name in PALLAS_NAMES:
        module, _, attribute = f"jax.experimental.pallas.{name}".rpartition(".")
        try:
            found = hasattr(importlib.import_module(module), attribute)
        except ImportError as error:
            return f"JAX {jax.__version__} cannot import `{module}`: {error}"
        if not found:
            return f"needs `{module}.{attribute}`, which JAX {jax.__version__} does not have"
    return None
