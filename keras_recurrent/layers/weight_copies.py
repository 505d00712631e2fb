"""Copies of weights that XLA programs on CPUs read faster: in float32, or transposed.

XLA on CPUs multiplies bfloat16 matrices in float32, and rounds the result. Each launch of a program
would convert the weights, which takes longer than several decoding steps. A row of int8 is
multiplied 2 to 3 times as fast by rows of a transposed matrix as by columns. In a `copies_scope`,
layers read copies that were made before; the results are bit-identical.
"""

import contextlib
import contextvars
import functools

import keras
from keras import ops

from keras_recurrent.dispatch import BACKEND
from keras_recurrent.layers.integer_products import transposed_scope

# {id of a variable: its copy}
_copies: contextvars.ContextVar[dict] = contextvars.ContextVar("_copies")


@contextlib.contextmanager
def copies_scope(variables, copies):
    """Context manager in which layers read the copies of these variables."""
    token = _copies.set(dict(zip(map(id, variables), copies, strict=True)))
    try:
        yield
    finally:
        _copies.reset(token)


def copied_weights(layer):
    """Returns a list of the variables that a layer can read from copies.

    These are bfloat16 weights and, on JAX, matrices of int8 products.
    """
    if not layer.built:
        return []
    is_embedding = isinstance(layer, keras.layers.ReversibleEmbedding)
    reverse = [] if not is_embedding or layer.tie_weights else [layer.reverse_embeddings]
    if layer.quantization_mode == "int8":
        quantizer = getattr(layer, "inputs_quantizer", None)
        has_int8_inputs = getattr(quantizer, "output_dtype", None) == "int8"
        kernels = [layer._kernel] if type(layer) is keras.layers.Dense else reverse
        return kernels if has_int8_inputs and BACKEND == "jax" else []
    if getattr(layer, "lora_enabled", False) or layer.quantization_mode:
        return []
    weights = [layer.kernel] if type(layer) is keras.layers.Dense else []
    weights += [layer.embeddings, *reverse] if is_embedding else []
    return [weight for weight in weights if weight.dtype == "bfloat16"]


def make_copy(weights):
    """Returns the copy of the value of one of the `copied_weights`."""
    is_int8 = keras.backend.standardize_dtype(weights.dtype) == "int8"
    return ops.transpose(weights) if is_int8 else ops.cast(weights, "float32")


def find_copy(variable):
    """Returns the copy of a variable, or None."""
    return _copies.get({}).get(id(variable))


def multiply_by_copies(matmul):
    """Returns a `matmul` of Keras that reads the float32 copy of its second argument, if any."""

    @functools.wraps(matmul)
    def call(x1, x2):
        copy = find_copy(x2)
        if copy is None or keras.backend.standardize_dtype(copy.dtype) == "int8":
            return matmul(x1, x2)
        return ops.cast(ops.matmul(ops.cast(x1, "float32"), copy), x1.dtype)

    return call


def multiply_int8_by_copies(int8_call):
    """Returns the `_int8_call` of a `Dense` that reads the copy of the kernel, if there is one."""

    @functools.wraps(int8_call)
    def call(layer, *args, **kwargs):
        with transposed_scope(find_copy(layer._kernel)):
            return int8_call(layer, *args, **kwargs)

    return call
