"""Decide which implementation of an operation runs.

A folder below `backends/` is an implementation, a file in it an operation. `PREFERENCE` says which
folders serve a Keras backend, fastest first; the first that accepts the arguments runs. Where the
backend's own folder has no file of an operation, `portable/` has its plain implementation. An
implementation that is missing, or refuses (by its `unsupported`), says why, and the next is asked.
One that raises an error is not replaced by the next, and an error while a folder is imported is
raised: a folder is left out only where it says by `unavailable` that something it needs is missing.
On a Keras backend without a row in `PREFERENCE`, everything can be imported and layers can be
made, but every operation refuses.

JAX traces a program before it is known where it runs. There the automatic choice between Pallas,
Triton and plain JAX is made by the arguments' shapes and dtypes, and by the platform once the
program is lowered: all that may serve are traced, one is compiled.
"""

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import threading
from typing import NamedTuple

import keras

from keras_recurrent import import_order, portable
from keras_recurrent.backends import host, reference
from keras_recurrent.devices import split_time

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


def serving():
    """The implementations that serve the running Keras backend, fastest first; perhaps none."""
    return PREFERENCE.get(BACKEND, ())


def _names(package):
    """The operations that a package has files of: its public modules."""
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return [name for name in names if not name.startswith("_")]


def _operations(package):
    """{operation: its module}."""
    return {n: importlib.import_module(f"{package.__name__}.{n}") for n in _names(package)}


def _implementation(name, operations):
    """{operation: its module in a folder of backends/, or the reason why there is none}."""
    folder = importlib.import_module(f"keras_recurrent.backends.{name}")
    unavailable = getattr(folder, "unavailable", None)
    reason = unavailable() if unavailable else None
    found = dict.fromkeys(_names(folder), reason) if reason else _operations(folder)
    return {o: found.get(o, f"there is no backends/{name}/{o}.py") for o in operations}


# {operation: {implementation: its module, or the reason why there is none}}
IMPLEMENTATIONS: dict = {operation: {} for operation in _operations(reference)}
for _name in serving():
    for _operation, _module in _implementation(_name, IMPLEMENTATIONS).items():
        IMPLEMENTATIONS[_operation][_name] = _module

# What exporters take, and the plain implementation of an operation without a file for this backend.
PORTABLE = "portable"


def portable_module(operation):
    """The portable implementation of an operation, or the reason why there is none."""
    found = f"{portable.__name__}.{operation}"
    if importlib.util.find_spec(found) is None:
        return f"there is no keras_recurrent/portable/{operation}.py"
    return importlib.import_module(found)


for _operation, _row in IMPLEMENTATIONS.items():
    if isinstance(_row.get(BACKEND), str):
        _row[BACKEND] = portable_module(_operation)

if BACKEND == "jax":
    from keras_recurrent.backends.jax import _layouts, _platforms, _shards
if BACKEND == "torch":
    from keras_recurrent.backends.torch import _common as torch_common

_chosen = threading.local()  # `name`; torch.compile sees through it, not through a ContextVar


@contextlib.contextmanager
def implementation(name):
    """Run operations in one named implementation, and in no other, inside a `with` block.

    The choice is made when an operation is called or traced: a function that was compiled
    before keeps what it was compiled with.

    Args:
        name: string, a folder of `backends/` that serves the running Keras backend, such as
            `"jax"`; `"portable"`, which exporters take (see `keras_recurrent.portable`); None
            restores the automatic choice.

    Raises:
        ValueError: the name is unknown on this backend.

    Example:

    >>> import numpy as np, keras, keras_recurrent
    >>> x = np.ones((1, 4, 2), "float32")
    >>> with keras_recurrent.implementation(keras.config.backend()):
    ...     h, state = keras_recurrent.ops.linear_scan(x, -x)
    """
    if name is not None:
        _check(name)
    before = chosen_name()
    _chosen.name = name
    try:
        yield
    finally:
        _chosen.name = before


def chosen_name():
    return getattr(_chosen, "name", None)


class Choice(NamedTuple):
    """Which implementation runs an operation, and why the ones before it do not."""

    operation: str
    implementation: str | None
    refused: dict[str, str]

    def __str__(self):
        runs = "nothing runs"
        if self.implementation:
            folder = f"backends/{self.implementation}"
            if _implemented(self.operation, self.implementation) is portable_module(self.operation):
                folder = "keras_recurrent/portable"
            runs = f"{folder}/{self.operation}.py runs"
        elif BACKEND not in PREFERENCE:
            runs += f". keras_recurrent has implementations for {', '.join(PREFERENCE)}; the "
            runs += "environment variable KERAS_BACKEND, set before Keras is imported, chooses"
        refused = "".join(f"\n  not {name}: {reason}" for name, reason in self.refused.items())
        return f"`{self.operation}` on {BACKEND}: {runs}{refused}"


def choose(operation, arguments, implementation=None):
    """The `Choice` for native tensors, by the keyword arguments of an implementation (a dict)."""
    name = implementation or (PORTABLE if exports() else chosen_name())
    refused = {}
    for candidate in (_check(name),) if name else serving():
        reason = _refusal(operation, candidate, arguments)
        if reason is None and not name:
            reason = _platform_reason(candidate, arguments)
        if reason is None:
            return Choice(operation, candidate, refused)
        refused[candidate] = reason
    return Choice(operation, None, refused)


def _refusal(operation, name, arguments):
    """Why an implementation refuses these arguments or is missing; None if it takes them."""
    module = _implemented(operation, name)
    if isinstance(module, str):
        return module
    unsupported = getattr(module, "unsupported", None)
    return unsupported(**arguments) if unsupported else None


def _implemented(operation, name):
    """The module of an implementation, or the reason why it is missing."""
    return portable_module(operation) if name == PORTABLE else IMPLEMENTATIONS[operation][name]


def exports():
    """Whether a graph is made for an exporter: by the name, or by `torch.export`."""
    name = chosen_name()
    if name or BACKEND != "torch":
        return name == PORTABLE
    return torch_common.is_exporting()


def _platform_reason(name, arguments):
    """Why an implementation for one platform cannot run where these arguments are; else None."""
    if BACKEND == "jax" and name in _platforms.PLATFORMS:
        return _platforms.platform_reason(arguments, _platforms.PLATFORMS[name])
    return None


def decodes_with_kernels(tensor):
    """Returns True if a decoding step on this tensor's device should call the Triton kernels.

    That is on an NVIDIA GPU, or wherever `implementation("triton")` is in force.
    """
    if "triton" not in serving() or keras.distribution.distribution() is not None:
        return False
    if chosen_name():
        return chosen_name() == "triton"
    if BACKEND == "jax":
        import jax

        return jax.default_backend() == "gpu"
    return tensor.is_cuda


def is_traced(arguments):
    """Whether the arguments are those of a program of JAX that is being traced."""
    return BACKEND == "jax" and _platforms.is_traced(arguments)


def run(operation, arguments, implementation=None):
    """Computes an operation with the implementation that `choose` names."""
    return resolve(operation, arguments, implementation)(**arguments)


def resolve(operation, arguments, implementation=None):
    """Returns the function that computes an operation on these arguments, given by keyword.

    Raises:
        NotImplementedError: no implementation accepts them.
    """
    choice = choose(operation, arguments, implementation)
    name = choice.implementation
    if name is None:
        raise NotImplementedError(str(choice))
    row = IMPLEMENTATIONS[operation]
    function = getattr(_implemented(operation, name), operation)
    shards = split_time.active_shards()
    if shards is not None:
        return lambda **arguments: shards.run(operation, arguments, function)
    if BACKEND != "jax":
        return function
    _shards.check_axes(operation, arguments)
    if name in _platforms.PLATFORMS and not (implementation or chosen_name()):
        kernels = {
            platform: row[name]
            for name, platform in _platforms.PLATFORMS.items()
            if not (_refusal(operation, name, arguments) or _platform_reason(name, arguments))
        }
        function = _platforms.choose_at_lowering(row["jax"], **kernels)
    distribution = keras.distribution.distribution()
    if distribution is None or name == PORTABLE:
        return function
    mesh, axis = distribution.device_mesh.backend_mesh, distribution.batch_dim_name
    return lambda **arguments: _layouts.run(operation, function, arguments, mesh, axis)


def chosen_module(operation, arguments):
    """The file that `choose` names, for functions beside the operation; None if there is none."""
    name = choose(operation, arguments).implementation
    return None if name is None else _implemented(operation, name)


def _check(name):
    if name not in (*serving(), PORTABLE):
        raise ValueError(
            f"`implementation` must be one of {', '.join(map(repr, serving())) or 'none'} on the "
            f"Keras backend {BACKEND!r}; got {name!r}. KERAS_BACKEND changes the backend."
        )
    return name
