"""Launches in Triton's interpreter, on NumPy arrays: slow, and meant for tests."""

import threading

import numpy as np

_lock = threading.Lock()  # the interpreter keeps the program's number for the whole process


class _Pointer:
    """What the interpreter asks of a tensor, for a NumPy array."""

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
        """The interpreter has written into the array itself."""


def run(launch, *arrays):
    """The arrays that a launch writes; its inputs say only which of them are given."""
    rest = iter(arrays)
    inputs = [np.ascontiguousarray(next(rest)) if given else None for given in launch.inputs]
    outputs = [None if a is None else np.zeros(a.shape, dtype(a.dtype)) for a in launch.outputs]
    for place, out in launch.updates:
        outputs[out][...] = inputs[place]
    tensors = [None if x is None else _Pointer(x) for x in (*inputs, *outputs)]
    with _lock:
        launch.kernel[(launch.programs,)](*tensors, *launch.numbers, **dict(launch.options))
    return tuple(x for x in outputs if x is not None)


def dtype(name):
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return name
