"""Operations of a decoding step, which layers call for one token of each sequence.

These functions are not public, and are not operations of Keras. They take the keyword arguments of
the functions in `backends/reference/`, without checks and without symbolic tensors. The Triton
kernels read each weight once and have no gradients. `portable/` has an implementation for all
backends.
"""

import functools

import keras

from keras_recurrent import dispatch


def _run(operation, **arguments):
    """Computes an operation with the values of variables."""
    return dispatch.run(operation, {name: _value(x) for name, x in arguments.items()})


def _value(x):
    if isinstance(x, list):
        return [_value(tensor) for tensor in x]
    return x.value if isinstance(x, keras.Variable) else x


embedding_step = functools.partial(_run, "embedding_step")
hgrn2_delayed_step = functools.partial(_run, "hgrn2_delayed_step")
hgrn2_step = functools.partial(_run, "hgrn2_step")
lightning_step = functools.partial(_run, "lightning_step")
local_attention_step = functools.partial(_run, "local_attention_step")
mamba2_step = functools.partial(_run, "mamba2_step")
norm_linear = functools.partial(_run, "norm_linear")
norm_quantized_linear = functools.partial(_run, "norm_quantized_linear")
rg_lru_step = functools.partial(_run, "rg_lru_step")
soft_cap = functools.partial(_run, "soft_cap")
