"""The NVIDIA GPU that JAX lowers for, and the part of its CUDA plugin that launches kernels."""

import functools
import importlib
import os

from ..constants import LOWEST_CAPABILITY

LOWEST = 10 * LOWEST_CAPABILITY[0] + LOWEST_CAPABILITY[1]
OVERRIDE = "KERAS_RECURRENT_CUDA_CAPABILITY"
CALL, OLDER_CALL = "triton_kernel_call_ffi", "triton_kernel_call"
_NAMES = (  # all that is read of the plugin
    "TritonKernel",
    "TritonKernelCall",
    "create_array_parameter",
    "create_scalar_parameter",
    "get_compute_capability",
)


def unavailable() -> str | None:
    """Why launches cannot be put into programs of the installed JAX; None if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None  # they are called back from programs for the CPU
    missing = [name for name in _NAMES if not hasattr(plugin(), name)]
    if len(missing) == len(_NAMES):
        return "JAX has no CUDA plugin; the extra `jax-cuda` of keras-recurrent installs it"
    return f"JAX's CUDA plugin has no `{missing[0]}`" if missing else None


def plugin():
    """The part of JAX's CUDA plugin that launches Triton's kernels; it is private to JAX."""
    return importlib.import_module("jaxlib.gpu_triton")


@functools.cache
def takes_part_in_graphs():
    """Whether the plugin has the custom call that XLA makes a part of CUDA graphs.

    Then the host launches what surrounds such calls and the calls at once, and not one by one.
    """
    module = getattr(plugin(), "_cuda_triton", None)
    return CALL in getattr(module, "registrations", dict)()


@functools.cache
def capability():
    """The compute capability to compile for, 90 for 9.0: the variable's, that of GPU 0, or 80.

    80 is for machines without a GPU. What is compiled for it runs on later GPUs, too.
    """
    given = os.environ.get(OVERRIDE)
    if given:
        if not given.isdecimal():
            raise ValueError(f"{OVERRIDE} must be a number, such as 90 for 9.0; got {given!r}.")
        return int(given)
    try:
        return plugin().get_compute_capability(0)
    except RuntimeError:  # no driver, or no GPU
        return LOWEST


def suffices():
    return capability() >= LOWEST
