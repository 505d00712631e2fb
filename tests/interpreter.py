"""Triton's interpreter without repeated work; the results are bit-identical.

At each launch the interpreter replaces Triton's functions by functions of NumPy, and restores them
at the end. In between, each call of another function, such as `tl.sum`, searches hundreds of names
that are replaced already, which takes more than half of the time. Each lookup of a dtype builds the
table of all dtypes.
"""

import functools

from triton.runtime import interpreter


def spare_repeated_work():
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    look_up = interpreter._get_np_dtype
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

    for owner, name, faster in (
        (interpreter, "_patch_lang", replace_once),
        (interpreter.GridExecutor, "__call__", launch_once),
        (interpreter, "_get_np_dtype", dtype_of),
    ):
        setattr(owner, name, faster)
