"""Triton's interpreter without repeated work; the results are bit-identical.

At each launch the interpreter replaces Triton's functions by functions of NumPy, and restores them
at the end. In between, each call of another function, such as `tl.sum`, searches hundreds of names
that are replaced already, which takes more than half of the time. Each lookup of a dtype builds the
table of all dtypes. Each operation on integers runs again in 64 bits, to find an overflow, which
the small tensors of tests do not have. Each tensor creates objects for its sizes, and each pair of
tensors creates objects for its common sizes. A scan combines single numbers.
"""

import functools
import math

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def spare_repeated_work():
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    look_up, broadcast = interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value
    look_up_once = functools.cache(look_up)
    replaced = set()  # functions whose names were replaced since the launch began

    def replace_once(function):
        if function in replaced:
            return None  # only a launch, which is the first call, restores names
        replaced.add(function)
        return replace(function)

    @functools.wraps(launch)
    def launch_once(self, *arguments, **options):
        replaced.clear()
        try:
            return launch(self, *arguments, **options)
        finally:
            replaced.clear()

    def dtype_of(tensor_type):
        element = tensor_type.scalar
        return look_up(element) if element.is_ptr() else look_up_once(element)

    @functools.cache
    def objects_of(sizes):
        return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(n) for n in sizes])

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = objects_of(tuple(type.shape) if type.is_block() else ())

    def broadcast_unequal(self, x, y):
        types = x.type, y.type
        if all(t.is_block() for t in types) and types[0].shape.values == types[1].shape.values:
            return x, y
        return broadcast(self, x, y)

    def scan_rows(self, tensors):
        """Combines all numbers of a row along the axis at once."""
        arrays = [np.moveaxis(t.handle.data, self.axis, 0) for t in tensors]
        results = [[array[0]] for array in arrays]
        for row in zip(*(array[1:] for array in arrays), strict=True):
            numbers = [*(result[-1] for result in results), *row]
            arguments = map(self.to_tensor, numbers, 2 * [t.dtype for t in tensors])
            found = self.combine_fn.fn(*arguments)
            found = found if isinstance(found, tuple) else (found,)
            for result, x in zip(results, found, strict=True):
                result.append(x.handle.data.reshape(row[0].shape))
        results = [np.moveaxis(np.stack(result), 0, self.axis) for result in results]
        return [self.to_tensor(x, t.dtype) for x, t in zip(results, tensors, strict=True)]

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    for owner, name, faster in (
        (interpreter, "_patch_lang", replace_once),
        (interpreter.GridExecutor, "__call__", launch_once),
        (interpreter, "_get_np_dtype", dtype_of),
        (tl.tensor, "__init__", init_tensor),
        (TritonSemantic, "broadcast_impl_value", broadcast_unequal),
        (interpreter.ScanOps, "generic_scan", scan_rows),
    ):
        setattr(owner, name, faster)
