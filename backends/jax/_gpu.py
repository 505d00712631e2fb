"""The NVIDIA GPU that JAX lowers for, and the part of its CUDA plugin that launches kernels."""

import functools
import importlib
import os

from ..constants import LOWEST_CAPABILITY

MIN_CAPABILITY = 10 * LOWEST_CAPABILITY[0] + LOWEST_CAPABILITY[1]
OVERRIDE = "KERAS_RECURRENT_CUDA_CAPABILITY"
CALL, OLDER_CALL = "triton_kernel_call_ffi", "triton_kernel_call"
_NAMES = (  # all attributes of the plugin that are read
    "TritonKernel",
    "TritonKernelCall",
    "create_array_parameter",
    "create_scalar_parameter",
    "get_compute_capability",
)


def unavailable() -> str | None:
    """Reason the installed JAX cannot launch Triton kernels from a program, or None."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None  # interpreted in callbacks from CPU programs
    missing = [name for name in _NAMES if not hasattr(plugin(), name)]
    if len(missing) == len(_NAMES):
        return "JAX has no CUDA plugin; the extra `jax-cuda` of keras-recurrent installs it"
    return f"JAX's CUDA plugin has no `{missing[0]}`" if missing else None


def plugin():
    """The part of JAX's CUDA plugin that launches Triton's kernels; it is private to JAX."""
    return importlib.import_module("jaxlib.gpu_triton")


@functools.cache
def supports_cuda_graphs():
    """Returns True if the plugin has the custom call that XLA can include in CUDA graphs.

    The host then launches these calls and the operations around them at once, not one by one.
    """
    module = getattr(plugin(), "_cuda_triton", None)
    return CALL in getattr(module, "registrations", dict)()


@functools.cache
def capability():
    """The compute capability to compile for, 90 for 9.0: from the variable, GPU 0, or 80.

    80 is for machines without a GPU. Code compiled for it also runs on later GPUs.
    """
    given = os.environ.get(OVERRIDE)
    if given:
        if not given.isdecimal():
            raise ValueError(f"{OVERRIDE} must be a number, such as 90 for 9.0; got {given!r}.")
        return int(given)
    try:
        return plugin().get_compute_capability(0)
    except RuntimeError:  # no driver, or no GPU
        return MIN_CAPABILITY
