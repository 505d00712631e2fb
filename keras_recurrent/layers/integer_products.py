"""Products of int8 tensors: exact on JAX with NVIDIA GPUs, and fast on CPUs of JAX and torch.

On NVIDIA GPUs, XLA doubles some products (`upstream.py`). For these, the first operand is converted
to int32, for which XLA uses another kernel; on other platforms of JAX, the result does not change.
On CPUs, Keras's products convert int8 matrices to int32, on JAX if the other operand is a single
row; `multiply_on_jax` and `multiply_on_torch` avoid this.
"""

import contextlib
import contextvars
import functools
import math

import keras

from keras_recurrent import compat

EXACT_MULTIPLE = 4  # XLA is exact if the contracted size is a multiple of this
EXACT_SUM = 1024  # products of two int8, of which float32 represents every sum
# The transposed second operand [O, N] of the int8 products `[…, N] @ [N, O]` of a layer on JAX.
_transposed: contextvars.ContextVar = contextvars.ContextVar("_transposed", default=None)


@contextlib.contextmanager
def transposed_scope(matrix):
    """Context manager in which int8 products on JAX read `matrix` instead of their second operand.

    With None, products read their operands.
    """
    token = _transposed.set(matrix)
    try:
        yield
    finally:
        _transposed.reset(token)


def multiply_on_jax(matmul):
    """Returns a `matmul` of Keras that is exact for int8, and converts no matrix on CPUs.

    On CPUs, XLA converts the matrix for one row, but not for two, so a row of zeros is added.
    """
    import jax

    @functools.wraps(matmul)
    def call(x1, x2):
        if not _are_int8(x1, x2):
            return matmul(x1, x2)
        multiply, shape, size = matmul, x1.shape[:-1], x2.shape[-1]
        transposed = _transposed.get()
        if transposed is not None:
            multiply, x2 = functools.partial(keras.ops.einsum, "...n,on->...o"), transposed

        def add_row(x1, x2):
            rows = keras.ops.pad(keras.ops.reshape(x1, (1, -1)), ((0, 1), (0, 0)))
            return keras.ops.reshape(multiply(rows, x2)[:1], (*shape, size))

        if x1.shape[-1] % EXACT_MULTIPLE:
            return multiply(keras.ops.cast(x1, "int32"), x2)
        if len(x2.shape) == 2 and math.prod(shape) == 1:
            x1, x2 = map(keras.ops.convert_to_tensor, (x1, x2))
            if isinstance(x1, jax.Array) and isinstance(x2, jax.Array):  # neither is sparse
                return jax.lax.platform_dependent(x1, x2, cpu=add_row, default=multiply)
        return multiply(x1, x2)

    return call


def exact_einsum(einsum):
    """Returns an `einsum` of Keras that is exact for int8."""

    @functools.wraps(einsum)
    def call(subscripts, *operands, **kwargs):
        if _are_int8(*operands) and contracted_size(subscripts, *operands) % EXACT_MULTIPLE:
            operands = (keras.ops.cast(operands[0], "int32"), *operands[1:])
        return einsum(subscripts, *operands, **kwargs)

    return call


def multiply_on_torch(matmul):
    """Returns a `matmul` of Keras that multiplies int8 matrices on CPUs of torch without int32.

    On CPUs without VNNI, torch's product of int8 is slow or wrong: oneDNN adds pairs of products in
    16 bits. Products in float32 are exact: each sum has an absolute value of at most 2**24.
    """
    import torch

    from keras_recurrent.backends.torch._common import is_exporting

    has_kernel = torch.backends.mkldnn.is_available() and compat._is_vnni_supported()

    @functools.wraps(matmul)
    def call(x1, x2):
        if not _are_int8(x1, x2) or is_exporting() or torch.jit.is_tracing():
            return matmul(x1, x2)
        x1, x2 = map(keras.ops.convert_to_tensor, (x1, x2))
        is_product = x1.ndim > 1 and x2.ndim == 2 and x1.shape[-1] == x2.shape[0] > 0
        on_cpu = x1.device.type == x2.device.type == "cpu"
        # Autocast would round products in float32.
        if not is_product or not on_cpu or torch.is_autocast_enabled("cpu"):
            return matmul(x1, x2)
        rows = x1.reshape(-1, x1.shape[-1])
        if has_kernel:
            # torch reads wrong elements of expanded tensors.
            matrix = x2 if x2.t().is_contiguous() else x2.contiguous()
            product = torch._int_mm(rows.contiguous(), matrix)
        else:
            blocks = zip(rows.split(EXACT_SUM, 1), x2.split(EXACT_SUM), strict=True)
            product = sum((a.float() @ b.float()).int() for a, b in blocks)
        return product.reshape(*x1.shape[:-1], x2.shape[-1])

    return call


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
