"""The loss of language models."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TokenCrossentropy(keras.losses.Loss):
    """Crossentropy between the logits of tokens and the tokens that follow.

    ```
    loss = -log softmax(y_pred)[y_true]
    ```

    As `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, which on torch moves the
    vocabulary of `[B, T, vocabulary]` before the tokens, and loses much time there on a GPU. Here
    the tokens of all rows are one batch. The default `loss` of the language models' `compile`.

    Args:
        reduction, name, dtype: as in `keras.losses.Loss`. Logits are cast to `dtype`, by default
            `keras.config.floatx()`.

    Call arguments:
        y_true: integers `[B, T]`.
        y_pred: logits `[B, T, vocabulary]`.
        sample_weight: `[B, T]`, 0 where a token does not count.

    Returns:
        A scalar in `dtype`, the mean over the tokens; `[B, T]` with `reduction=None`.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.models import TokenCrossentropy
    >>> loss = TokenCrossentropy()(np.array([[0, 1]]), np.array([[[9.0, 0.0], [0.0, 0.0]]]))
    >>> print(f"{float(loss):.3f}")
    0.347
    """

    def __init__(self, reduction="sum_over_batch_size", name="token_crossentropy", dtype=None):
        super().__init__(name=name, reduction=reduction, dtype=dtype)

    def call(self, y_true, y_pred):
        return crossentropy(y_true, y_pred)


def crossentropy(tokens, logits):
    """The loss of each token, in the dtype of the logits."""
    shape = ops.shape(logits)
    losses = ops.sparse_categorical_crossentropy(
        ops.reshape(tokens, (-1,)), ops.reshape(logits, (-1, shape[-1])), from_logits=True
    )
    return ops.reshape(losses, shape[:-1])
