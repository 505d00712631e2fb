"""Products of int8 tensors: exact on JAX with NVIDIA GPUs, and fast on torch with CPUs.

On NVIDIA GPUs, XLA doubles some products (`upstream.py`). `exact_matmul` and `exact_einsum` convert
the first operand to int32, for which XLA uses another kernel; on other platforms of JAX, the result
does not change. On torch, `multiply_on_cpu` avoids Keras's conversion of int8 matrices to int32.
"""

import functools
import math

import keras

EXACT_MULTIPLE = 4  # XLA is exact if the contracted size is a multiple of this


def exact_matmul(matmul):
    """Returns a `matmul` of Keras that is exact for int8."""

    @functools.wraps(matmul)
    def call(x1, x2):
        if _are_int8(x1, x2) and x1.shape[-1] % EXACT_MULTIPLE:
            x1 = keras.ops.cast(x1, "int32")
        return matmul(x1, x2)

    return call


def exact_einsum(einsum):
    """Returns an `einsum` of Keras that is exact for int8."""

    @functools.wraps(einsum)
    def call(subscripts, *operands, **kwargs):
        if _are_int8(*operands) and contracted_size(subscripts, *operands) % EXACT_MULTIPLE:
            operands = (keras.ops.cast(operands[0], "int32"), *operands[1:])
        return einsum(subscripts, *operands, **kwargs)

    return call


def multiply_on_cpu(matmul):
    """Returns a `matmul` of Keras that does not convert int8 matrices on CPUs of torch."""
    import torch

    from keras_recurrent.backends.torch._common import is_exporting

    # Without it, torch.compile would trace the probe.
    is_fast = torch.compiler.assume_constant_result(lambda: _has_fast_products())

    @functools.wraps(matmul)
    def call(x1, x2):
        if not _are_int8(x1, x2) or is_exporting():
            return matmul(x1, x2)
        x1, x2 = map(keras.ops.convert_to_tensor, (x1, x2))
        is_product = x1.ndim > 1 and x2.ndim == 2 and x1.shape[-1] == x2.shape[0] > 0
        on_cpu = x1.device.type == x2.device.type == "cpu"
        if not is_product or not on_cpu or not is_fast():
            return matmul(x1, x2)
        # torch reads wrong elements of expanded tensors.
        rows = x1.reshape(-1, x1.shape[-1]).contiguous()
        matrix = x2 if x2.t().is_contiguous() else x2.contiguous()
        return torch._int_mm(rows, matrix).reshape(*x1.shape[:-1], x2.shape[-1])

    return call


@functools.cache
def _has_fast_products():
    """Returns False without oneDNN, and on CPUs without VNNI.

    On these CPUs, oneDNN adds pairs of products in 16 bits.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    if not torch.backends.mkldnn.is_available():
        return False
    with _disable_current_modes():
        ones = torch.ones(64, 64, dtype=torch.int8, device="cpu")
        return bool((torch._int_mm(127 * ones, 127 * ones) == 64 * 127**2).all())


def _are_int8(*operands):
    dtypes = [str(getattr(x, "dtype", "")) for x in operands]
    return len(dtypes) == 2 and all(dtype in ("int8", "torch.int8") for dtype in dtypes)


def contracted_size(subscripts, x1, x2):
    """Returns the number of products in each sum of an `einsum` of two tensors."""
    inputs, _, output = subscripts.replace(" ", "").partition("->")
    left, right = inputs.split(",")
    contracted = set(left) & set(right) - set(output) - {"."}
    return math.prod(x1.shape[_axis(left, label)] for label in contracted)


def _axis(labels, label):
    """The axis of a label; negative after an ellipsis, which matches any number of axes."""
    before, ellipsis, after = labels.partition("...")
    return after.index(label) - len(after) if ellipsis and label in after else before.index(label)
