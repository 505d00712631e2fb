"""Decide which implementation of an operation runs.

A folder below `backends/` is an implementation, a file in it an operation. `PREFERENCE` says which
folders serve a Keras backend, fastest first; the first that accepts the arguments runs. An
implementation that is missing, or refuses (by its `unsupported`), says why, and the next is asked;
one that raises is not covered up. Neither is an error in the import of a folder: it is left out
only where the package that it needs is not installed.

JAX traces a program before it is known where it runs. There the automatic choice between Pallas
and plain JAX is made by the arguments' shapes and dtypes, and by the platform once the program is
lowered: both are traced, one is compiled.
"""

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import threading
from typing import NamedTuple

import keras

from keras_recurrent.backends import reference

BACKEND = keras.config.backend()
PREFERENCE = {
    "jax": ("pallas", "jax"),
    "torch": ("triton", "torch"),
    "tensorflow": ("tensorflow",),
}
if os.environ.get("TRITON_INTERPRET") == "1":
    # Its kernels then run in NumPy, on any device: the slowest of all, and only when asked for.
    PREFERENCE["torch"] = ("torch", "triton")
# What an implementation needs beside the framework of its backend.
REQUIRES = {"triton": "triton"}
if BACKEND not in PREFERENCE:
    raise ImportError(
        f"keras_recurrent runs on the Keras backends {', '.join(PREFERENCE)}, but Keras runs on "
        f"{BACKEND!r}. Set the environment variable KERAS_BACKEND to one of them."
    )


def _operations(package):
    """Every public module of a package: {operation: module}."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return {
        name: importlib.import_module(f"{package.__name__}.{name}")
        for name in names
        if not name.startswith("_")
    }


def _implementation(name, operations):
    """{operation: its module in a folder of backends/, or the reason why there is none}."""
    needed = REQUIRES.get(name)
    if needed and importlib.util.find_spec(needed) is None:
        return dict.fromkeys(operations, f"the package `{needed}` is not installed")
    found = _operations(importlib.import_module(f"keras_recurrent.backends.{name}"))
    return {o: found.get(o, f"there is no backends/{name}/{o}.py") for o in operations}


# {operation: {implementation: its module, or the reason why there is none}}
KERNELS: dict = {operation: {} for operation in _operations(reference)}
for _name in PREFERENCE[BACKEND]:
    for _operation, _module in _implementation(_name, KERNELS).items():
        KERNELS[_operation][_name] = _module

if "pallas" in PREFERENCE[BACKEND]:
    from keras_recurrent.backends.pallas import _platform

_chosen = threading.local()  # `name`; torch.compile sees through it, not through a ContextVar


@contextlib.contextmanager
def implementation(name):
    """Run operations in one named implementation, and in no other, inside a `with` block.

    The choice is made when an operation is called or traced: a function that was compiled
    before keeps what it was compiled with.

    Args:
        name: string, a folder of `backends/` that serves the running Keras backend, such as
            `"jax"`; None restores the automatic choice.

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
    before = _chosen_name()
    _chosen.name = name
    try:
        yield
    finally:
        _chosen.name = before


def _chosen_name():
    return getattr(_chosen, "name", None)


class Choice(NamedTuple):
    """Which implementation runs an operation, and why the ones before it do not."""

    operation: str
    implementation: str | None
    refused: dict[str, str]

    def __str__(self):
        runs = (
            f"backends/{self.implementation}/{self.operation}.py runs"
            if self.implementation
            else "nothing runs"
        )
        refused = "".join(f"\n  not {name}: {reason}" for name, reason in self.refused.items())
        return f"`{self.operation}` on {BACKEND}: {runs}{refused}"


def choose(operation, arguments, implementation=None):
    """The `Choice` for native tensors, as the kernels take them (a dict of keyword arguments)."""
    name = implementation or _chosen_name()
    refused = {}
    for candidate in (_check(name),) if name else PREFERENCE[BACKEND]:
        module = KERNELS[operation][candidate]
        reason = module if isinstance(module, str) else _refusal(module, arguments)
        if reason is None and candidate == "pallas" and not name:
            reason = _platform.elsewhere(arguments)
        if reason is None:
            return Choice(operation, candidate, refused)
        refused[candidate] = reason
    return Choice(operation, None, refused)


def _refusal(module, arguments):
    """Why a module refuses these arguments; None if it takes them, as one without a rule does."""
    unsupported = getattr(module, "unsupported", None)
    return unsupported(**arguments) if unsupported else None


def run(operation, arguments, implementation=None):
    """Call the kernel that `choose` names."""
    choice = choose(operation, arguments, implementation)
    if choice.implementation is None:
        raise NotImplementedError(str(choice))
    kernel = getattr(KERNELS[operation][choice.implementation], operation)
    if choice.implementation != "pallas":
        return kernel(**arguments)
    if not (implementation or _chosen_name()):
        kernel = _platform.either(*(KERNELS[operation][name] for name in ("pallas", "jax")))
    with _mesh():
        return kernel(**arguments)


def _mesh():
    """The devices of `keras.distribution`, on whose shards the kernels run."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return contextlib.nullcontext()
    return _platform.over(distribution.device_mesh.backend_mesh)


def _check(name):
    if name not in PREFERENCE[BACKEND]:
        raise ValueError(
            f"`implementation` must be one of {', '.join(map(repr, PREFERENCE[BACKEND]))} on the "
            f"Keras backend {BACKEND!r}; got {name!r}. KERAS_BACKEND changes the backend."
        )
    return name
