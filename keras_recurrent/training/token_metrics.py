"""Loss per token and perplexity as Keras metrics."""

import keras
from keras import ops

from keras_recurrent.ops.token_crossentropy import token_crossentropy


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TokenLoss(keras.metrics.Mean):
    """Mean cross-entropy of the tokens in nats, weighted by `sample_weight`.

    ```
    Σ_t w_t (-log softmax(y_pred_t)[y_true_t]) / Σ_t w_t
    ```

    Both sums run over all batches of an epoch, so the result depends neither on padding nor on the
    sizes of the batches. The `loss` that `fit` reports is the optimized number instead, which by
    default counts padding and masked prompts as 0.

    Pass it in `weighted_metrics`, because Keras passes no sample weights to `metrics`. `fit` and
    `evaluate` of the language models then compute it without materializing the logits.

    Args:
        name: string.
        dtype: dtype of both sums. None: `keras.config.floatx()`.

    Arguments of `update_state`:
        y_true: integers `[B, T]`, the next tokens. A token outside the vocabulary makes the result
            NaN, unless its weight is 0.
        y_pred: logits `[B, T, vocabulary]`.
        sample_weight: `[B, T]` or `[B, T, 1]`, 0 for tokens to ignore; or `[B]` or `[B, 1]`, for
            sequences. None: all 1.

    Returns:
        `result()`: a scalar; 0 before the first token.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.metrics import TokenLoss
    >>> metric = TokenLoss()
    >>> metric.update_state(np.array([[0, -100]]), np.zeros((1, 2, 4)), np.array([[1, 0]]))
    >>> print(f"{float(metric.result()):.4f}")  # log 4
    1.3863

    Example in training:

    >>> import keras_recurrent
    >>> from keras_recurrent.models import GriffinCausalLM
    >>> model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1, sequence_length=8)
    >>> model.compile(weighted_metrics=[TokenLoss(), keras_recurrent.metrics.Perplexity()])
    >>> sorted(model.evaluate(["tick", "tock"], verbose=0, return_dict=True))
    ['loss', 'perplexity', 'token_loss']
    >>> print(keras_recurrent.which_loss(model))
    hidden states
    """

    def __init__(self, name="token_loss", dtype=None):
        super().__init__(name=name, dtype=dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        tokens = ops.convert_to_tensor(y_true)
        weights = as_token_weights(tokens, sample_weight)
        # A loss of NaN times a weight of 0 would still be NaN.
        tokens = ops.where(ops.cast(weights, "bool"), tokens, ops.zeros_like(tokens))
        losses = token_crossentropy(y_pred, tokens)
        self.add(ops.sum(losses * ops.cast(weights, losses.dtype)), ops.sum(weights))

    def add(self, total, count):
        """Adds the weighted loss and the weight of a batch, both summed over its tokens."""
        self.total.assign_add(ops.cast(total, self.dtype))
        self.count.assign_add(ops.cast(count, self.dtype))


@keras.saving.register_keras_serializable(package="keras_recurrent")
class Perplexity(TokenLoss):
    """Perplexity of the tokens: the exponential of `TokenLoss`.

    ```
    exp(Σ_t w_t (-log softmax(y_pred_t)[y_true_t]) / Σ_t w_t)
    ```

    Args:
        name, dtype: as in `TokenLoss`, whose arguments and use are the same.

    Returns:
        `result()`: a scalar; 1 before the first token.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.metrics import Perplexity
    >>> metric = Perplexity()
    >>> metric.update_state(np.array([[0, 1]]), np.zeros((1, 2, 4)))
    >>> print(f"{float(metric.result()):.2f}")
    4.00
    """

    def __init__(self, name="perplexity", dtype=None):
        super().__init__(name=name, dtype=dtype)

    def result(self):
        return ops.exp(super().result())


def as_token_weights(tokens, sample_weight):
    """Returns `sample_weight` in float32 with the shape of `tokens`, `[B, T]`; None: all 1."""
    if sample_weight is None:
        return ops.ones_like(tokens, dtype="float32")
    # Data sources of torch pass tensors on the CPU, which Keras moves to the device of the model.
    weights = ops.cast(ops.convert_to_tensor(sample_weight), "float32")
    if len(weights.shape) == len(tokens.shape) + 1:
        weights = ops.squeeze(weights, -1)
    elif len(weights.shape) == len(tokens.shape) - 1:
        weights = ops.expand_dims(weights, -1)  # one weight for each sequence, as in Keras
    return weights * ops.ones_like(tokens, dtype="float32")  # so that their sum counts all tokens
