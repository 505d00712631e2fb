"""Cross-entropy loss of language models."""

import keras
from keras import ops

from keras_recurrent import compat
from keras_recurrent.checks.shapes import check_rank_known
from keras_recurrent.ops.token_crossentropy import token_crossentropy
from keras_recurrent.training.token_metrics import as_token_weights


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TokenCrossentropy(keras.losses.Loss):
    """Cross-entropy between logits and the next tokens.

    ```
    loss = -log softmax(y_pred)[y_true]
    ```

    Equals `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, computed by the operation
    `keras_recurrent.ops.token_crossentropy`. Keras would first copy the logits to float32, and on
    some backends twice more, which takes gigabytes for long sequences and large vocabularies. It is
    the default `loss` in `compile` of the language models.

    Args:
        reduction: string or None, as in `keras.losses.Loss`. `"sum_over_batch_size"`, the default:
            the sum of the weighted losses divided by the number of all tokens, also those of
            weight 0. `"mean_with_sample_weight"`: divided by the sum of the weights, so that
            padding and masked prompts do not shrink the loss; 0 if all weights are 0. With
            either, `fit` and `evaluate` of the language models do not materialize the logits.
        name: string.
        dtype: dtype of the result. None: `keras.config.floatx()`. The losses of tokens are computed
            in float32, or float64 for float64 logits, and then cast to it.

    Call arguments:
        y_true: integers `[B, T]`. The loss of a token outside the vocabulary is NaN, unless its
            weight is 0.
        y_pred: logits `[B, T, vocabulary]`, of any float dtype.
        sample_weight: `[B, T]`, 0 for tokens to ignore. Their labels may be any number, such as -1
            or -100, and their logits get no gradient. Tokens where a Keras mask of `y_pred` is
            False are ignored, too.

    Returns:
        A scalar in `dtype`, reduced over the tokens; `[B, T]` with `reduction=None`.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.models import TokenCrossentropy
    >>> loss = TokenCrossentropy()(np.array([[0, 1]]), np.array([[[9.0, 0.0], [0.0, 0.0]]]))
    >>> print(f"{float(loss):.3f}")
    0.347

    Example with labels padded with -100, as in other libraries:

    >>> labels = np.array([[0, -100]])
    >>> logits = np.array([[[9.0, 0.0], [0.0, 0.0]]])
    >>> loss = TokenCrossentropy()(labels, logits, sample_weight=labels != -100)
    >>> print(f"{float(loss):.5f}")
    0.00006
    >>> mean = TokenCrossentropy(reduction="mean_with_sample_weight")
    >>> print(f"{float(mean(labels, logits, sample_weight=labels != -100)):.5f}")
    0.00012
    """

    def __init__(self, reduction="sum_over_batch_size", name="token_crossentropy", dtype=None):
        super().__init__(name=name, reduction=reduction, dtype=dtype)

    @property
    def dtype(self):
        """Returns None, so that Keras casts neither the logits nor the tokens."""
        return None

    def __call__(self, y_true, y_pred, sample_weight=None):
        # A loss of NaN times a weight of 0 would still be NaN.
        y_true = labels = ops.convert_to_tensor(y_true)
        if sample_weight is not None:
            sample_weight = self._token_weights(labels, sample_weight)
        mask = compat.get_keras_mask(y_pred)
        for weight in (sample_weight, None if mask is None else self._token_weights(labels, mask)):
            if weight is not None:
                y_true = ops.where(ops.cast(weight, "bool"), y_true, ops.zeros_like(y_true))
        return super().__call__(y_true, y_pred, sample_weight)

    def _token_weights(self, y_true, weight):
        weight = ops.convert_to_tensor(weight)
        check_rank_known(self.name, "sample_weight", weight)
        check_rank_known(self.name, "y_true", y_true)
        return as_token_weights(y_true, weight)

    def call(self, y_true, y_pred):
        return ops.cast(token_crossentropy(y_pred, y_true), super().dtype)
