"""The crossentropy of tokens."""

import keras

from keras_recurrent.checks.dtypes import dtype_of
from keras_recurrent.ops.operation import Operation


@keras.saving.register_keras_serializable(package="keras_recurrent")
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
        if dtype_of(tokens) not in ("int32", "int64"):  # kernels take no others
            wide = dtype_of(tokens) in ("uint32", "uint64")
            tokens = keras.ops.cast(tokens, "int64" if wide else "int32")
        return {**tensors, "tokens": tokens}


def token_crossentropy(logits, tokens, *, implementation=None):
    """The negative logarithm of the probability that logits give to tokens, in nats.

    ```
    loss = -log softmax(logits)[token] = log(sum(exp(logits))) - logits[token]
    ```

    Logits of 16 bits are not copied to 32: for the gradient they are kept as they are, with two
    numbers a token, and nothing else of their size is made but their gradient. On TensorFlow that
    takes XLA (`jit_compile`); on a CPU, XLA copies them all the same.

    A logit of -inf is a token that cannot come; its gradient is 0, and the loss of such a token
    itself inf. The loss of a token that is not
    in the vocabulary, -1 or V, is NaN, and so is the gradient of its logits: no backend looks at
    the numbers before, which would mean to wait for the GPU. Where a token does not count, put any
    other there and leave out its loss.

    A NaN or inf among the logits of a token, or in the gradient that arrives at its loss, reaches
    the loss and the gradient of all logits of this token, and of no other.

    Args:
        logits: `[..., V]`, float16, bfloat16, float32 or float64.
        tokens: `[...]`, integers from 0 to V - 1.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        The losses as `[...]` in float32, or float64 if the logits are. All is computed in it.

    Raises:
        ValueError: a shape or dtype does not fit, V is 0, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: a sure one, one of two and one of three.

    >>> import numpy as np
    >>> from keras_recurrent.ops import token_crossentropy
    >>> logits = np.array([[0, 99, 0], [5, 5, -np.inf], [0, 0, 0]], "float32")
    >>> np.exp(-np.array(token_crossentropy(logits, np.array([1, 1, 1])))).round(4)
    array([1.    , 0.5   , 0.3333], dtype=float32)
    """
    return TokenCrossentropyOperation.apply({"logits": logits, "tokens": tokens}, implementation)
