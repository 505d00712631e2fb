"""The crossentropy of tokens, of what the logits are made of."""

import keras

from keras_recurrent.checks.arguments import is_finite_number
from keras_recurrent.ops.operation import Operation

REDUCTIONS = ("sum", None)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LinearCrossentropyOperation(Operation):
    function = "linear_crossentropy"
    options = {"soft_cap": None, "reduction": "sum"}

    @classmethod
    def check(cls, tensors, context, options):
        soft_cap, reduction = options["soft_cap"], options["reduction"]
        if soft_cap is not None and (not is_finite_number(soft_cap) or soft_cap <= 0):
            raise ValueError(
                f"`{cls.function}`: `soft_cap` must be a finite number above 0, or None for logits "
                f"without a bound; got {soft_cap!r}."
            )
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"`{cls.function}`: `reduction` must be 'sum', or None for a loss of each token; "
                f"got {reduction!r}."
            )
        sizes = super().check(tensors, context, options)
        if sizes["V"] == 0:
            raise ValueError(
                f"`{cls.function}`: `embedding` must have a vocabulary of at least one token; got "
                f"the shape {tuple(tensors['embedding'].shape)}."
            )
        return sizes

    def output_spec(self, tensors, sizes):
        loss, best = super().output_spec(tensors, sizes)
        if self.options["reduction"] == "sum":
            loss = keras.KerasTensor((), loss.dtype)
        return loss, best


def linear_crossentropy(
    x,
    embedding,
    tokens,
    sample_weight=None,
    *,
    soft_cap=None,
    reduction="sum",
    implementation=None,
):
    """The crossentropy of tokens from hidden states, without the logits of all of them.

    ```
    z = x E^T,  or  c tanh(x E^T / c) with a soft cap c
    loss = Σ_t w_t (log(sum(exp(z_t))) - z_t[token_t])
    ```

    It is `keras_recurrent.ops.token_crossentropy` of logits that some thousand tokens at a time
    are given and that are forgotten at once: with a vocabulary of 256,000, the logits of 16,384
    tokens and their gradient would take 8 gigabytes each in 16 bits. Products are summed in the
    dtype of the loss, and the logits not rounded to that of `x`; the gradient of `embedding` is
    summed in it, too. The gradient of the sum is made in the forward pass, where one is asked for
    (on TensorFlow in the backward); that of single losses makes the logits once more.

    A loss is NaN, and so is its gradient, where the vocabulary lacks the token, unless its weight
    is 0: there any number may stand, such as -100.

    Args:
        x: `[..., D]`, float16, bfloat16, float32 or float64: hidden states.
        embedding: `[V, D]`, as `x`: the embeddings of tied weights; of untied ones, a map
            `[D, V]`, its transpose.
        tokens: `[...]`, integers from 0 to V - 1.
        sample_weight: `[...]`, floats; None: all 1.
        soft_cap: number, the bound c of logits, as RecurrentGemma has it; None: no bound.
        reduction: `"sum"`, or None for a loss of each token.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        `(loss, best)`: the sum of the losses in nats times their weights, a scalar, or these
        `[...]`, in float32, or float64 if a float tensor is; and the token with the largest logit
        `[...]`, int32, the first of several.

    Raises:
        ValueError: a shape or dtype does not fit, V is 0, `soft_cap` or `reduction` is none of the
            above, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: accuracy beside the loss.

    >>> import numpy as np
    >>> from keras_recurrent.ops import linear_crossentropy
    >>> x = np.array([[3.0, 0.0], [0.0, 0.0], [0.0, 3.0]], "float32")
    >>> embedding, tokens = np.eye(2, dtype="float32"), np.array([0, 1, -100])
    >>> loss, best = linear_crossentropy(x, embedding, tokens, np.array([1.0, 1.0, 0.0], "float32"))
    >>> print(f"{float(loss):.3f}", np.array(best))
    0.742 [0 0 1]
    """
    tensors = {"x": x, "embedding": embedding, "tokens": tokens, "sample_weight": sample_weight}
    options = {"soft_cap": soft_cap, "reduction": reduction}
    return LinearCrossentropyOperation.apply(tensors, implementation, options)
