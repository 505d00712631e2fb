"""Operations of a decoding step, which layers call for one token of each sequence.

These functions are not public, and are no operations of Keras: their arguments are those of an
implementation in `backends/`, which are not checked, and none may be symbolic. The Triton kernels
read each weight once and have no gradients. `portable/` has an implementation for all backends.
"""

import functools

import keras
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.checks.dtypes import dtype_of


def norm_linear(**arguments):
    """Applies RMSNorm and up to four linear layers to x [B, D], with optional gates and residual.

    With `squares`, sums of squares of rows, x has been multiplied by the norm's weight. With
    `gate`, the first two kernels form a gated unit, and the third, if any, takes its result. The
    outputs pass the `activation`, "squared_relu" or None, and are multiplied by `output_scale`;
    `residual` is added to the first output. Kernels and biases are passed as lists. See
    `backends/reference/norm_linear.py`.

    Returns:
        A list of outputs [B, N]: one for each kernel, or a single one with `gate`. With
        `next_scale`, the weight of the norm that follows, it ends with the product of the output
        and this weight, and with sums of squares of the output [B, U].
    """
    return list(_run("norm_linear", **arguments))


def norm_quantized_linear(x, quantize_row=True, **others):
    """Counterpart of `norm_linear` for quantized kernels of `keras.layers.Dense`.

    See `backends/reference/norm_quantized_linear.py`. With `quantize_row`, the normalized input is
    also quantized.
    """
    others["row_dtype"] = dtype_of(x) if quantize_row else None
    return list(_run("norm_quantized_linear", x=x, **others))


def local_attention_step(q, k, v, key, value, position, frequencies=None, **others):
    """Computes the attention of one query; see `backends/reference/local_attention_step.py`."""
    if frequencies is not None and frequencies.shape[0] == 0:
        frequencies = None
    # The cache has the dtypes of keys and values, as in a layer.
    key, value = ops.cast(key, k.dtype), ops.cast(value, v.dtype)
    others |= {"position": ops.cast(position, "int32"), "frequencies": frequencies}
    return _run("local_attention_step", q=q, k=k, v=v, key=key, value=value, **others)


def soft_cap(x, cap):
    """Returns cap tanh(x / cap) for logits [B, V], or x if `cap` is None."""
    return x if cap is None else _run("soft_cap", x=x, cap=cap)


def _run(operation, **arguments):
    """Computes an operation with the values of variables."""
    return dispatch.run(operation, {name: _value(x) for name, x in arguments.items()})


def _value(x):
    if isinstance(x, list):
        return [_value(tensor) for tensor in x]
    return x.value if isinstance(x, keras.Variable) else x


# Steps whose arguments are those of their files in `backends/reference/`.
hgrn2_step = functools.partial(_run, "hgrn2_step")
hgrn2_delayed_step = functools.partial(_run, "hgrn2_delayed_step")
lightning_step = functools.partial(_run, "lightning_step")
mamba2_step = functools.partial(_run, "mamba2_step")
rg_lru_step = functools.partial(_run, "rg_lru_step")
embedding_step = functools.partial(_run, "embedding_step")
