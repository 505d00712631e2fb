"""Causal depthwise convolution."""

from keras_recurrent.ops.recurrent_operation import RecurrentOperation


class CausalConv1DOperation(RecurrentOperation):
    function = "causal_conv1d"
    options = RecurrentOperation.options | {"activation": None}

    @classmethod
    def check(cls, tensors, context, options):
        check_activation(cls.function, options["activation"])
        return super().check(tensors, context, options)


def check_activation(where, activation):
    """Raises an error unless the activation is None or "silu", which the kernels fuse."""
    if activation not in (None, "silu"):
        raise ValueError(
            f"`{where}`: `activation` must be None or 'silu'; got {activation!r}. Apply any other "
            "activation to the output."
        )


@CausalConv1DOperation.public_function
def causal_conv1d(
    x,
    kernel,
    bias=None,
    *,
    activation=None,
    initial_state=None,
    mask=None,
    segment_ids=None,
    previous_segment_id=None,
    token_kind=None,
    reverse=False,
    implementation=None,
):
    """Computes a causal depthwise convolution over time.

    ```
    z_t = bias + sum_j kernel[j] * x_{t-W+1+j},   j = 0 … W-1
    y_t = z_t, or silu(z_t) = z_t σ(z_t)
    ```

    The temporal convolution before the recurrence of De et al. 2024 (arXiv:2402.19427, section
    2.3). `kernel[W-1]` multiplies the current token. Padding is skipped: the filter sees the last W
    real tokens of the document, including those of the state, and zeros before them.

    A NaN or an infinity reaches only the outputs of the W tokens that see it, and the gradients of
    the inputs of those outputs and of its channel's filter and bias.

    Args:
        x: `[B, T, D]`, float16, bfloat16, float32 or float64.
        kernel: `[W, D]`, W at least 1.
        bias: `[D]`, or None.
        activation: None, or `"silu"`, fused with the convolution: z is not saved for the gradient,
            but recomputed.
        initial_state: `[B, W - 1, D]`, the last real inputs, the most recent one last; None: zeros.
        mask, segment_ids, previous_segment_id, token_kind, reverse, implementation: as in
            `keras_recurrent.ops.linear_scan`.

    Returns:
        `(output, final_state)`: y as `[B, T, D]` in the dtype of `x`, and the last W - 1 real
        inputs of the document as `[B, W - 1, D]`. States and sums are float32, or float64 if a
        tensor is. Both carry gradients.

    Raises:
        ValueError: a shape or dtype does not fit, `x` has no token, a tensor is empty along another
            axis, or the activation or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: the difference from the token before.

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import causal_conv1d
    >>> x = np.array([[[1], [4], [9], [16]]], "float32")
    >>> y, state = causal_conv1d(x, np.array([[-1], [1]], "float32"))
    >>> keras.ops.convert_to_numpy(y).ravel()
    array([1., 3., 5., 7.], dtype=float32)
    """
