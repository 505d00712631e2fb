"""Real-gated linear recurrent unit, including its gates."""

from keras_recurrent.ops.recurrent_operation import RecurrentOperation


class RGLRUOperation(RecurrentOperation):
    function = "rg_lru"
    start_matters = True  # the multiplier of the first input is 1


@RGLRUOperation.public_function
def rg_lru(
    x,
    gate_a,
    gate_x,
    a_logit,
    *,
    initial_state=None,
    mask=None,
    segment_ids=None,
    previous_segment_id=None,
    token_kind=None,
    reverse=False,
    implementation=None,
):
    """Computes the real-gated linear recurrent unit from the pre-activations of its gates.

    ```
    r_t = sigmoid(gate_a_t)                          recurrence gate
    i_t = sigmoid(gate_x_t)                          input gate
    log a_t = -8 softplus(-a_logit) r_t              a_t = sigmoid(a_logit)^(8 r_t)
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t)
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.4). Equation 6 of the paper prints
    softplus(a_logit); with a = sigmoid(a_logit) it must be softplus(-a_logit), and DeepMind's
    released code stores -a_logit. For the first token of a document, h_t = i_t x_t, without the
    square root. 1 - a^2 is computed as -expm1(2 log a), which is accurate near a = 1; the
    derivative of the square root, unbounded near a = 1, is limited to 1000 as in the released code.

    A NaN or an infinity propagates as in `keras_recurrent.ops.linear_scan`, and to the gradient of
    its channel's `a_logit`.

    Args:
        x: `[B, T, D]`, float16, bfloat16, float32 or float64.
        gate_a: `[B, T, D]`, the recurrence gate before its sigmoid.
        gate_x: `[B, T, D]`, the input gate before its sigmoid.
        a_logit: `[D]`, the paper's Λ.
        initial_state: `[B, D]`, h before the first token. None: the first token starts a document.
        mask, segment_ids, previous_segment_id, token_kind, reverse, implementation: as in
            `keras_recurrent.ops.linear_scan`.

    Returns:
        `(output, final_state)`: h as `[B, T, D]` in the dtype of `x`, and the last h as `[B, D]`.
        States and sums are float32, or float64 if a tensor is. Both carry gradients.

    Raises:
        ValueError, NotImplementedError: as in `keras_recurrent.ops.linear_scan`.

    Example: open input gates, half-open recurrence gates and a = 1/2.

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import rg_lru
    >>> x = np.ones((1, 2, 1), "float32")
    >>> h, state = rg_lru(x, 0 * x, 100 * x, np.zeros(1, "float32"))
    >>> keras.ops.convert_to_numpy(h).ravel().round(4)
    array([1.   , 1.0605], dtype=float32)
    """
