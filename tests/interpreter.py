"""Triton's interpreter without work that it repeats: the results are the same, to the bit.

At a launch it replaces Triton's functions by those of NumPy, and puts them back at the end. Between
these it does so again at each call of another function, `tl.sum` among them: it looks through
hundreds of names that are replaced by then, which takes half of its time and more. It also writes
the table of all dtypes anew whenever it looks for one.
"""

import functools

from triton.runtime import interpreter

AS_IT_CAME = []  # [(what holds it, its name, what Triton had there)]


def spare_repeated_work():
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    look_up = interpreter._get_np_dtype
    look_up_once = functools.cache(look_up)
    replaced = set()  # the functions, since the launch, for which names were replaced

    def replace_once(function):
        if function in replaced:
            return None  # only a launch, which comes first, puts names back
        replaced.add(function)
        return replace(function)

    @functools.wraps(launch)
    def launch_anew(self, *arguments, **options):
        replaced.clear()
        try:
            return launch(self, *arguments, **options)
        finally:
            replaced.clear()

    def dtype_of(tensor_type):
        element = tensor_type.scalar
        return look_up(element) if element.is_ptr() else look_up_once(element)

    for holder, name, better in (
        (interpreter, "_patch_lang", replace_once),
        (interpreter.GridExecutor, "__call__", launch_anew),
        (interpreter, "_get_np_dtype", dtype_of),
    ):
        AS_IT_CAME.append((holder, name, getattr(holder, name)))
        setattr(holder, name, better)
