"""Cross-entropy from hidden states, without materializing the logits."""

import keras

from keras_recurrent.checks.arguments import is_finite_number
from keras_recurrent.ops.operation import Operation

REDUCTIONS = ("sum", None)


class LinearCrossentropyOperation(Operation):
    function = "linear_crossentropy"
    options = {"soft_cap": None, "reduction": "sum"}

    @classmethod
    def check(cls, tensors, context, options):
        soft_cap, reduction = options["soft_cap"], options["reduction"]
        if soft_cap is not None and (not is_finite_number(soft_cap) or soft_cap <= 0):
            raise ValueError(
                f"`{cls.function}`: `soft_cap` must be a finite number above 0, or None for logits "
                f"without a cap; got {soft_cap!r}."
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


@LinearCrossentropyOperation.public_function
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
    """Computes the cross-entropy of tokens from hidden states, without materializing the logits.

    ```
    z = x E^T,  or  c tanh(x E^T / c) with a soft cap c
    loss = Σ_t w_t (log(sum(exp(z_t))) - z_t[token_t])
    ```

    The result is that of `keras_recurrent.ops.token_crossentropy`, but only the logits of a few
    thousand tokens exist at a time: with a vocabulary of 256,000, the logits of 16,384 tokens and
    their gradient would take 8 gigabytes each in 16 bits. Products, and the gradient of
    `embedding`, are accumulated in the dtype of the loss, and logits are not rounded to the dtype
    of `x`. The gradient of the sum is computed in the forward pass if it is needed (on TensorFlow
    in the backward pass); the gradient of single losses recomputes the logits.

    The loss of a token id outside the vocabulary, and its gradient, are NaN. If the weight of the
    token is 0, its id is arbitrary, such as -100, and the gradient of the weight is the loss of
    token 0.

    Args:
        x: `[..., D]`, float16, bfloat16, float32 or float64: hidden states.
        embedding: `[V, D]`, of any of these dtypes: the embeddings if weights are tied, or else the
            transpose of the kernel `[D, V]` of the logits.
        tokens: `[...]`, integers from 0 to V - 1.
        sample_weight: `[...]`, floats; None: all 1.
        soft_cap: number, the soft cap c of logits, as in RecurrentGemma; None: no cap.
        reduction: `"sum"`, or None for the loss of each token.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        `(loss, best)`: the sum of the weighted losses in nats, a scalar, or the weighted losses
        `[...]`, in float32, or float64 if a float tensor is; and the argmax of the logits `[...]`,
        int32, the first of equal ones.

    Raises:
        ValueError: a shape or dtype does not fit, V is 0, `soft_cap` or `reduction` is invalid, or
            the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: the loss and the predicted tokens.

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import linear_crossentropy
    >>> x = np.array([[3.0, 0.0], [0.0, 0.0], [0.0, 3.0]], "float32")
    >>> embedding, tokens = np.eye(2, dtype="float32"), np.array([0, 1, -100])
    >>> loss, best = linear_crossentropy(x, embedding, tokens, np.array([1.0, 1.0, 0.0], "float32"))
    >>> print(f"{float(loss):.3f}", keras.ops.convert_to_numpy(best))
    0.742 [0 0 1]
    """
