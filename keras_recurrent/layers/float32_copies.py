"""Float32 copies of bfloat16 weights, for programs of XLA on CPUs.

XLA on CPUs multiplies bfloat16 matrices in float32, and rounds the result. Each launch of a program
would convert the weights, which takes longer than several decoding steps. In a `copies_scope`,
layers read copies that were converted before; the results are bit-identical.
"""

import contextlib
import contextvars
import functools

import keras
from keras import ops

# {id of a variable: its float32 copy}
_copies: contextvars.ContextVar[dict] = contextvars.ContextVar("_copies")


@contextlib.contextmanager
def copies_scope(variables, copies):
    """Context manager in which layers read the float32 copies of these variables."""
    token = _copies.set(dict(zip(map(id, variables), copies, strict=True)))
    try:
        yield
    finally:
        _copies.reset(token)


def copied_weights(layer):
    """Returns a list of the bfloat16 variables that a layer can read from float32 copies."""
    if getattr(layer, "lora_enabled", False) or layer.quantization_mode or not layer.built:
        return []
    weights = []
    if type(layer) is keras.layers.Dense:
        weights = [layer.kernel]
    elif isinstance(layer, keras.layers.ReversibleEmbedding):
        weights = [layer.embeddings, *([] if layer.tie_weights else [layer.reverse_embeddings])]
    return [weight for weight in weights if weight.dtype == "bfloat16"]


def find_copy(variable):
    """Returns the float32 copy of a variable, or None."""
    return _copies.get({}).get(id(variable))


def multiply_by_copies(matmul):
    """Returns a `matmul` of Keras that reads the copy of its second argument, if there is one."""

    @functools.wraps(matmul)
    def call(x1, x2):
        copy = find_copy(x2)
        if copy is None:
            return matmul(x1, x2)
        return ops.cast(ops.matmul(ops.cast(x1, "float32"), copy), x1.dtype)

    return call
