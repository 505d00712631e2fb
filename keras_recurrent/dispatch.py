"""Choice of the implementation that runs an operation.

A folder below `backends/` is an implementation. Its file `<operation>.py` defines the `Kernel` of
an operation. `PREFERENCE` lists the folders for each Keras backend, fastest first; the first that
accepts the arguments runs. If the backend's folder has no file for an operation, `portable/`
implements it. On JAX and TensorFlow, linear attention then runs in groups of tokens; on TensorFlow
also any operation over time whose length is unknown.

- An implementation that is missing, or rejects the arguments by its `unsupported`, gives a reason,
  and the next one is tried.
- An implementation that raises an error does not fall back to the next one.
- A folder is skipped only if its `unavailable` gives a reason. Other errors during its import are
  raised.
- On a Keras backend without an entry in `PREFERENCE`, everything can be imported and layers can be
  created, but all operations raise an error.

JAX traces a program before its platform is known. The automatic choice between Pallas, Triton,
cuDNN and plain JAX depends on shapes and dtypes while tracing, and on the platform when the
program is lowered: all candidates are traced, and one is compiled.
"""

import contextlib
import functools
import importlib
import os
import pkgutil
import threading
from typing import Any, NamedTuple

import keras

from keras_recurrent import import_order, portable
from keras_recurrent.backends import host, reference
from keras_recurrent.backends.kernel import load_kernel
from keras_recurrent.backends.signatures import SIGNATURES

BACKEND = keras.config.backend()
host.configure(BACKEND, import_order.triton_would_crash)


def preference(interprets_triton):
    """Returns the implementations that serve each Keras backend, fastest first.

    Args:
        interprets_triton: boolean, whether Triton's interpreter runs the Triton kernels. It runs
            them in NumPy, on any device, which is slower than any other implementation.
    """
    orders = {
        "jax": ("pallas", "triton", "jax"),
        "torch": ("cudnn", "triton", "torch"),
        "tensorflow": ("tensorflow",),
    }
    if interprets_triton:
        orders = {
            backend: tuple(sorted(names, key="triton".__eq__)) for backend, names in orders.items()
        }
    return orders


PREFERENCE = preference(interprets_triton=os.environ.get("TRITON_INTERPRET") == "1")
# Implementations for the current Keras backend, fastest first; may be empty.
BACKEND_PREFERENCE = PREFERENCE.get(BACKEND, ())


def _names(package):
    """Returns the names of the operations in a package, its public modules."""
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return [name for name in names if not name.startswith("_")]


def _implementation(name, operations):
    """Returns {operation: its `Kernel` in a folder of backends/, or why it is missing}."""
    folder = importlib.import_module(f"keras_recurrent.backends.{name}")
    unavailable = getattr(folder, "unavailable", None)
    reason, files = unavailable() if unavailable else None, _names(folder)

    def find(operation):
        if operation not in files:
            return f"there is no backends/{name}/{operation}.py"
        return reason or load_kernel(folder.__name__, operation)

    return {operation: find(operation) for operation in operations}


# {operation: {implementation: its `Kernel`, or the reason if it is missing}}
IMPLEMENTATIONS: dict = {operation: {} for operation in _names(reference)}
for _name in BACKEND_PREFERENCE:
    for _operation, _kernel in _implementation(_name, IMPLEMENTATIONS).items():
        IMPLEMENTATIONS[_operation][_name] = _kernel

# Name of the implementation for exporters and for operations without a file for this backend.
PORTABLE = "portable"


@functools.cache
def portable_kernel(operation):
    """Returns the portable `Kernel` of an operation, or the reason if it is missing."""
    if operation not in _names(portable):
        return f"there is no keras_recurrent/portable/{operation}.py"
    return load_kernel(portable.__name__, operation)


if BACKEND in ("jax", "tensorflow"):
    _time_groups = importlib.import_module(f"keras_recurrent.backends.{BACKEND}._time_groups")

# Operations of which the backend's folder has no file.
SERVED_BY_PORTABLE = [
    name for name, row in IMPLEMENTATIONS.items() if isinstance(row.get(BACKEND), str)
]
for _operation in SERVED_BY_PORTABLE:
    _kernel = portable_kernel(_operation)
    if BACKEND != "torch" and _operation in SIGNATURES and SIGNATURES[_operation].is_over_time:
        _kernel = _time_groups.group_tokens(_operation, _kernel.function)
    IMPLEMENTATIONS[_operation][BACKEND] = _kernel

PLATFORMS: dict[str, str] = {}  # {implementation: the only platform that it runs on}
if BACKEND == "jax":
    from keras_recurrent.backends.jax import _gpu, _layouts, _platforms, _shards
    from keras_recurrent.backends.jax._platforms import PLATFORMS, platform_reason
if BACKEND == "torch":
    from keras_recurrent.backends.torch._common import PLATFORMS, is_exporting, platform_reason

# Its attribute `name` is the active block's name. torch.compile can trace it, unlike a ContextVar.
_chosen = threading.local()
# `torch_sequence.Shards` of the `sequence_parallel` blocks. All threads share them: on a GPU,
# autograd recomputes a block in a separate thread.
_sequence_shards: list[Any] = []


@contextlib.contextmanager
def implementation(name):
    """Context manager in which all operations run in one named implementation.

    The choice is made when an operation is called or traced: a compiled function keeps the
    implementation it was compiled with.

    Args:
        name: string, a folder of `backends/` for the current Keras backend, such as `"jax"`; or
            `"portable"`, for exporters (see `keras_recurrent.portable`). None: restores the
            automatic choice.

    Raises:
        ValueError: the name is unknown on this backend.

    Example:

    >>> import numpy as np, keras, keras_recurrent
    >>> x = np.ones((1, 4, 2), "float32")
    >>> with keras_recurrent.implementation(keras.config.backend()):
    ...     h, state = keras_recurrent.ops.linear_scan(x, -x)
    """
    if name is not None:
        _check_name(name)
    before = getattr(_chosen, "name", None)
    _chosen.name = name
    try:
        yield
    finally:
        _chosen.name = before


def chosen_name():
    """Returns the name of the active `implementation` block, or None.

    Inside `torch.export`, it is "portable" unless a block has another name.
    """
    name = getattr(_chosen, "name", None)
    return PORTABLE if name is None and BACKEND == "torch" and is_exporting() else name


def active_shards():
    """Returns the `torch_sequence.Shards` of the active `sequence_parallel` block, or None."""
    return _sequence_shards[-1] if _sequence_shards else None


@contextlib.contextmanager
def activate_shards(shards):
    """Context manager in which `active_shards` returns `shards`; None: sequences are whole."""
    _sequence_shards.append(shards)
    try:
        yield
    finally:
        _sequence_shards.pop()


def check_not_split(what):
    """Raises an error inside `sequence_parallel`, for features that need whole sequences."""
    if active_shards() is not None:
        raise NotImplementedError(
            f"{what} inside `sequence_parallel`, where each process has a part of each sequence. "
            "Call it on whole sequences, outside."
        )


class Choice(NamedTuple):
    """The implementation that runs an operation, and why faster ones do not.

    Attributes:
        operation: string, the name of the operation.
        implementation: string, a folder of `backends/` or "portable". None: none can run.
        refused: `{implementation: reason}` of faster implementations.
    """

    operation: str
    implementation: str | None
    refused: dict[str, str]

    def __str__(self):
        runs = "nothing runs"
        if self.implementation:
            folder, portable_names = f"backends/{self.implementation}", [PORTABLE]
            if self.operation in SERVED_BY_PORTABLE:
                portable_names.append(BACKEND)
            if self.implementation in portable_names:
                folder = "keras_recurrent/portable"
            runs = f"{folder}/{self.operation}.py runs"
        elif BACKEND not in PREFERENCE:
            runs += f". keras_recurrent has implementations for {', '.join(PREFERENCE)}; the "
            runs += "environment variable KERAS_BACKEND, set before Keras is imported, chooses"
        refused = "".join(f"\n  not {name}: {reason}" for name, reason in self.refused.items())
        return f"`{self.operation}` on {BACKEND}: {runs}{refused}"


def choose(operation, arguments, implementation=None):
    """Returns the `Choice` for native tensors.

    arguments: the keyword arguments of an implementation, a dict.
    """
    name, _, refused = _find(operation, arguments, implementation)
    return Choice(operation, name, refused)


def _find(operation, arguments, implementation):
    """Returns the name and `Kernel` of an implementation, or None twice; and `Choice.refused`."""
    chosen = implementation or chosen_name()
    refused = {}
    for name in (_check_name(chosen),) if chosen else BACKEND_PREFERENCE:
        kernel = IMPLEMENTATIONS[operation].get(name) or portable_kernel(operation)
        reason = kernel if isinstance(kernel, str) else _reason(name, kernel, arguments, not chosen)
        if reason is None:
            return name, kernel, refused
        refused[name] = reason
    return None, None, refused


def _reason(name, kernel, arguments, checks_platform):
    """Returns the reason why a kernel cannot run on these arguments, or None."""
    reason = None
    if checks_platform and name in PLATFORMS:
        reason = platform_reason(arguments, PLATFORMS[name])
    if reason is None and kernel.unsupported:
        reason = kernel.unsupported(**arguments)
    return reason


def exports():
    """Returns True if a graph is being exported, with "portable" or by `torch.export`."""
    return chosen_name() == PORTABLE


def uses_triton_kernels(tensor):
    """Returns True if decoding steps and optimizers should call Triton kernels for this tensor.

    True on an NVIDIA GPU that the kernels support, and in an `implementation("triton")` block.
    False in a block of another implementation, and under `keras.distribution` on torch.
    """
    kernel = IMPLEMENTATIONS["soft_cap"].get("triton", "")
    if isinstance(kernel, str):
        return False
    if BACKEND != "jax" and keras.distribution.distribution() is not None:
        return False
    if chosen_name():
        return chosen_name() == "triton"
    if BACKEND == "jax":
        import jax

        return jax.default_backend() == "gpu" and _gpu.capability() >= _gpu.MIN_CAPABILITY
    return tensor.is_cuda and kernel.unsupported(tensor.detach(), cap=1.0) is None


def compile_ahead():
    """Context manager in which threads compile the Triton kernels of a first call.

    On JAX, kernels are compiled while a program is traced. On torch, the context manager yields
    True if kernels do not run inside it, but return zeros.
    """
    if isinstance(IMPLEMENTATIONS["soft_cap"].get("triton", ""), str):
        return contextlib.nullcontext()
    from keras_recurrent.backends.triton._runtime import framework

    return framework.compile_ahead()


def is_traced(arguments):
    """Returns True if JAX is tracing the arguments."""
    return BACKEND == "jax" and _platforms.is_traced(arguments)


def run(operation, arguments, implementation=None):
    """Computes an operation with the implementation that `choose` names."""
    return resolve(operation, arguments, implementation)(**arguments)


def resolve(operation, arguments, implementation=None):
    """Returns the function that computes an operation on these arguments, given by keyword.

    Raises:
        NotImplementedError: no implementation accepts them.
    """
    name, kernel, refused = _find(operation, arguments, implementation)
    if name is None:
        raise NotImplementedError(str(Choice(operation, None, refused)))
    shards = active_shards()
    if shards is not None:
        return lambda **arguments: shards.run(operation, arguments, kernel)
    if BACKEND != "jax":
        return kernel.function
    is_chosen = bool(implementation or chosen_name())
    return _resolve_on_jax(operation, name, kernel, arguments, is_chosen)


def _resolve_on_jax(operation, name, kernel, arguments, is_chosen):
    """Returns a function that also chooses a kernel by platform, and splits work by devices."""
    _shards.check_axes(operation, arguments)
    function = kernel.function
    if name in PLATFORMS and not is_chosen:
        row = IMPLEMENTATIONS[operation]
        kernels = {
            platform: row[name]
            for name, platform in PLATFORMS.items()
            if not isinstance(row[name], str) and _reason(name, row[name], arguments, True) is None
        }
        function = _platforms.choose_at_lowering(row["jax"], **kernels)
    distribution = keras.distribution.distribution()
    if distribution is None or name == PORTABLE:
        return function
    mesh, axis = distribution.device_mesh.backend_mesh, distribution.batch_dim_name
    return lambda **arguments: _layouts.run(operation, function, arguments, mesh, axis)


def _check_name(name):
    names = *BACKEND_PREFERENCE, PORTABLE
    if name not in names:
        raise ValueError(
            f"`implementation` must be one of {', '.join(map(repr, names))} on the Keras "
            f"backend {BACKEND!r}; got {name!r}. To change the backend, set KERAS_BACKEND."
        )
    return name
