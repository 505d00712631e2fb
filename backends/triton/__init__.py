"""Triton kernels for NVIDIA GPUs; each reads and writes a tensor as few times as possible.

A file of this folder implements the operation of its name; the folders that begin with an
underscore hold the code that operations share:

- `_runtime`: launches and operations, and how torch, JAX and the interpreter run them;
- `_device`: functions that kernels call, such as exponentials and matrix products;
- `_attention`, `_linear_attention`, `_scan`, `_convolution`, `_crossentropy`, `_decoding`,
  `_quantized`: the kernels of these groups of operations;
- `_optimizers`: updates of weights, which `keras_recurrent/optimizers` calls.

Arguments and results of decoding steps are described in `backends/reference`.

Kernels and their launches (`_runtime/launch.py`) do not depend on a framework:
`_runtime/torch_operators.py` turns them into custom operators of torch,
`_runtime/jax_functions.py` into functions of JAX. Tile sizes follow from shapes by a fixed rule, so
results for equal inputs are bit-identical, and a new shape costs one compilation per kernel. On
torch, `keras_recurrent.autotune` times tile sizes and chooses the fastest at run time
(`_runtime/search.py`).

Arithmetic is float32. Matrix products of softmax attention take bfloat16 and float16 operands
directly, matrix products of linear attention bfloat16 alone. Float32 operands are split into
bfloat16 parts, and never rounded to TF32 (`_device/products.py`).

With TRITON_INTERPRET=1, set before triton is first imported, the same kernels run in NumPy on a
CPU. That is very slow and meant for tests.
"""

import importlib.util

from .. import host

if host.framework == "jax":
    from ..jax import _gpu


def unavailable():
    """Reason why this folder cannot be imported, or None."""
    on_jax = host.framework == "jax"
    if importlib.util.find_spec("triton") is None:
        remedy = "; the extra `jax-cuda` of keras-recurrent installs it" if on_jax else ""
        return f"the package `triton` is not installed{remedy}"
    if not on_jax:
        return None
    if host.triton_would_crash():
        return (
            "TensorFlow was imported before triton, which would now end in a segmentation fault; "
            "import keras_recurrent first, or begin the program with `import triton`"
        )
    return _gpu.unavailable()
