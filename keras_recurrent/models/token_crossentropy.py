"""The loss of language models."""

import keras
from keras import ops

from keras_recurrent.ops.token_crossentropy import token_crossentropy


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TokenCrossentropy(keras.losses.Loss):
    """Crossentropy between the logits of tokens and the tokens that follow.

    ```
    loss = -log softmax(y_pred)[y_true]
    ```

    As `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, by the operation
    `keras_recurrent.ops.token_crossentropy`: Keras would copy the logits to float32 first, and
    some of its backends twice more, gigabytes where rows and vocabulary are large. The default
    `loss` of the language models' `compile`.

    Args:
        reduction, name: as in `keras.losses.Loss`.
        dtype: of the result; None: `keras.config.floatx()`. The losses of tokens are computed in
            float32, or float64 if the logits are, and then cast to it.

    Call arguments:
        y_true: integers `[B, T]`. Where one is not in the vocabulary the loss is NaN, also if its
            weight is 0.
        y_pred: logits `[B, T, vocabulary]`, of any float dtype.
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

    @property
    def dtype(self):
        """None: Keras then casts neither the logits nor the tokens."""
        return None

    def call(self, y_true, y_pred):
        return ops.cast(token_crossentropy(y_pred, y_true), super().dtype)
