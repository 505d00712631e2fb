"""Triton kernels: PyTorch on NVIDIA GPUs. What is read is read once, what is written once.

Each operation is an operator of its own with a backward operator, as in `backends/torch`: one
node for `torch.compile`, no graph breaks, the same limits. Nothing is tuned at run time unless a
user asks for it by `keras_recurrent.autotune` (`_search.py`): sizes come from shapes by a fixed
rule, so the same inputs give the same bits, and a new shape costs one compilation a kernel.
Arithmetic is float32. Matrix products, in attention alone, take bfloat16 tensors as they are,
softmax attention float16, too, and all others in more than one part, never in TF32 by itself
(`_products.py`).

With TRITON_INTERPRET=1, set before the first import of triton, the same kernels run on a CPU, in
NumPy and very slowly: that is for tests.
"""

import importlib.util


def unavailable():
    """Why nothing in this folder can be imported; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package `triton` is not installed"
    return None
