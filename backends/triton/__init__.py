"""Triton kernels for NVIDIA GPUs; each reads and writes a tensor as few times as it can.

In this folder a kernel is a GPU program, and the public function of a file is the implementation of
an operation; what operations share is in the folders that begin with an underscore. Kernels and
their launches (`_runtime/launch.py`) name no framework; `_runtime/torch_operators.py` makes custom
operators of torch of them, `_runtime/jax_functions.py` functions of JAX. Tile sizes follow from
shapes by a fixed rule, so the same inputs give the same bits, and a new shape costs one compilation
a kernel. On torch they are timed and chosen at run time inside `keras_recurrent.autotune`
(`_runtime/search.py`).

Arithmetic is float32. Matrix products in softmax attention take bfloat16 and float16 tensors as
they are; those in linear attention take bfloat16 as it is. Float32 operands are split into bfloat16
parts, and never rounded to TF32 (`_device/products.py`).

With TRITON_INTERPRET=1, set before triton is first imported, the same kernels run in NumPy on a
CPU. That is very slow and meant for tests.
"""

import importlib.util

from .. import host

if host.framework == "jax":
    from ..jax import _gpu


def unavailable():
    """Why nothing in this folder can be imported; None if it can."""
    on_jax = host.framework == "jax"
    if importlib.util.find_spec("triton") is None:
        how = "; the extra `jax-cuda` of keras-recurrent installs it" if on_jax else ""
        return f"the package `triton` is not installed{how}"
    if not on_jax:
        return None
    if host.triton_would_crash():
        return (
            "TensorFlow was imported before triton, which would now end in a segmentation fault; "
            "import keras_recurrent first, or begin the program with `import triton`"
        )
    return _gpu.unavailable()
