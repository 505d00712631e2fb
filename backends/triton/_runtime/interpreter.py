"""Launches in Triton's interpreter, on NumPy arrays: slow, and meant for tests."""

import threading

import numpy as np

from .launch import flat, map_arrays

_lock = threading.Lock()  # the interpreter stores the program id globally in the process


class _Pointer:
    """A NumPy array with the methods of a tensor that the interpreter calls."""

    def __init__(self, array):
        self.array = array
        self.dtype = array.dtype.name

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, size, device):
        return self

    def set_(self, *_):
        pass

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides

    def copy_(self, other):
        """Does nothing: the interpreter has written into the array itself."""


def run(launch, *arrays):
    """Runs a launch on NumPy arrays and returns its outputs.

    The inputs of the launch are booleans: True for each of the given `arrays`.
    """
    rest = iter(arrays)
    inputs = map_arrays(
        lambda given: np.ascontiguousarray(next(rest)) if given else None, launch.inputs
    )
    outputs = map_arrays(
        lambda a: a if a is None else np.zeros(a.shape, dtype(a.dtype)), launch.outputs
    )
    for index, out in launch.updates:
        outputs[out][...] = inputs[index]
    tensors = map_arrays(lambda x: x if x is None else _Pointer(x), (*inputs, *outputs))
    with _lock:
        launch.kernel[(launch.programs,)](*tensors, *launch.numbers, **dict(launch.options))
    return tuple(x for x in flat(outputs) if x is not None)


def dtype(name):
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return name
