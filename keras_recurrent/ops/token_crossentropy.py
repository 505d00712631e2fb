"""Cross-entropy of tokens from logits."""

import keras

from keras_recurrent.checks.dtypes import dtype_of
from keras_recurrent.ops.operation import Operation


class TokenCrossentropyOperation(Operation):
    function = "token_crossentropy"

    @classmethod
    def check(cls, tensors, context, options):
        sizes = super().check(tensors, context, options)
        if sizes["V"] == 0:
            raise ValueError(
                f"`{cls.function}`: `logits` must have a vocabulary of at least one token; got the "
                f"shape {tuple(tensors['logits'].shape)}."
            )
        return sizes

    @classmethod
    def lower(cls, tensors, context, options):
        tokens = tensors["tokens"]
        if dtype_of(tokens) not in ("int32", "int64"):  # the dtypes of the kernels
            wide = dtype_of(tokens) in ("uint32", "uint64")
            tokens = keras.ops.cast(tokens, "int64" if wide else "int32")
        return {**tensors, "tokens": tokens}


@TokenCrossentropyOperation.public_function
def token_crossentropy(logits, tokens, *, implementation=None):
    """Computes the cross-entropy of tokens from logits, in nats.

    ```
    loss = -log softmax(logits)[token] = log(sum(exp(logits))) - logits[token]
    ```

    16-bit logits are not converted to 32 bits: they are saved for the gradient without a copy, with
    two numbers per token, and only their gradient needs memory of their size. On TensorFlow this
    requires XLA (`jit_compile`); on CPUs, XLA makes a copy.

    A logit of -inf is a token of probability 0: its gradient is 0, and the loss of such a token is
    inf. For token ids outside the vocabulary, such as -1 or V, the loss and the gradient of the
    logits are NaN: no backend validates ids, because this would synchronize with the GPU. For
    tokens to ignore, pass any id of the vocabulary and discard the loss.

    A NaN or inf in the logits of a token, or in the incoming gradient of its loss, reaches the loss
    and the gradient of all logits of this token, and of no other token.

    Args:
        logits: `[..., V]`, float16, bfloat16, float32 or float64.
        tokens: `[...]`, integers from 0 to V - 1.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        The losses as `[...]` in float32, or float64 if the logits are, computed in this dtype.

    Raises:
        ValueError: a shape or dtype does not fit, V is 0, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: probabilities of 1, 1/2 and 1/3.

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import token_crossentropy
    >>> logits = np.array([[0, 99, 0], [5, 5, -np.inf], [0, 0, 0]], "float32")
    >>> loss = token_crossentropy(logits, np.array([1, 1, 1]))
    >>> np.exp(-keras.ops.convert_to_numpy(loss)).round(4)
    array([1.    , 0.5   , 0.3333], dtype=float32)
    """
