"""Snapshots of a model's layers, to reuse traced programs after another `compile`."""

import functools
import sys
import types
from typing import Any

import keras
import numpy as np

from keras_recurrent.compat import Node

COMPARED = {"keras", "keras_hub", "keras_recurrent"}  # packages whose objects are compared
TRUSTED = COMPARED | {"jax", "jaxlib", "numpy", "tensorflow", "torch", *sys.stdlib_module_names}
CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
# Attributes of layers that earlier calls and training change.
IGNORED = {"_called", "_inbound_nodes", "_loss_ids", "_losses", "_metrics", "_outbound_nodes"}


class Snapshot:
    """Attributes and methods of a model's layers at one time, which its programs depend on.

    Python numbers, strings, collections and NumPy arrays are compared by value, the attributes of
    Keras's objects one by one, and other objects by identity. The values of weights do not count:
    programs take them as inputs.

    Args:
        model: the language model.

    Attributes:
        is_complete: boolean, False if a layer, or a function that it uses, is defined outside
            Keras, KerasHub and this package. Such code may also depend on variables of its module.
    """

    def __init__(self, model):
        self._model, self.is_complete = model, True
        # {id: number and object}: an object that is kept alive keeps its id.
        self._visited: dict[int, tuple[int, Any]] = {}
        self._variables = {id(v): i for i, v in enumerate(model.variables)}
        methods = {n: v for n, v in vars(model).items() if _is_method(type(model), n)}
        distribution = keras.distribution.distribution()
        values = type(model), methods, model.backbone, distribution
        self._state = tuple(map(self._key, values))

    def matches(self, other):
        """Returns True if the programs of two snapshots are certain to be equal."""
        return self.is_complete and other.is_complete and self._state == other._state

    def verify(self):
        """Marks the snapshot as incomplete if the layers changed; runs before each tracing."""
        self.is_complete = self.matches(Snapshot(self._model))

    def _key(self, value):
        """Returns nested tuples that are equal for values that programs cannot tell apart."""
        kind = type(value)
        if isinstance(value, CONSTANTS):
            return kind, value
        if isinstance(value, keras.Variable):
            self.is_complete &= id(value) in self._variables
            return self._variables.get(id(value))
        if kind.__name__ in ("Parameter", "ParameterDict"):  # the weights on torch
            return kind.__name__
        if id(value) in self._visited:
            return self._visited[id(value)][0]
        self._visited[id(value)] = len(self._visited), value
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, dict):
            return kind, *((self._key(k), self._key(v)) for k, v in value.items())
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(map(self._key, value))
        if isinstance(value, (list, tuple)):
            return kind, *map(self._key, value)
        if isinstance(value, functools.partial):
            return kind, *map(self._key, (value.func, value.args, value.keywords))
        if isinstance(value, types.MethodType):
            return kind, self._key(value.__func__), self._key(value.__self__)
        if isinstance(value, type):
            return self._class_key(value)
        is_function = isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
        self.is_complete &= _package(value if is_function else kind) in TRUSTED
        if is_function or isinstance(value, (keras.KerasTensor, Node)):
            return id(value)
        if _package(kind) not in COMPARED:
            return id(value)
        attributes = getattr(value, "__dict__", {}).items()
        return self._key(kind), *((n, self._key(v)) for n, v in attributes if n not in IGNORED)

    def _class_key(self, kind):
        self.is_complete &= all(_package(base) in TRUSTED for base in kind.__mro__)
        methods = [dict(vars(base)) for base in kind.__mro__ if _package(base) in COMPARED]
        self._visited[id(methods)] = len(self._visited), methods
        return id(kind), *(tuple(map(id, each.values())) for each in methods)


def _package(value):
    return str(value.__module__).partition(".")[0]


def _is_method(kind, name):
    return callable(getattr(kind, name, None))
