"""Diagonal linear recurrence on complex numbers."""

from keras_recurrent.ops.recurrent_operation import RecurrentOperation


class ComplexLinearScan(RecurrentOperation):
    function = "complex_linear_scan"


@ComplexLinearScan.public_function
def complex_linear_scan(
    x,
    log_a,
    phase,
    *,
    initial_state=None,
    mask=None,
    segment_ids=None,
    previous_segment_id=None,
    token_kind=None,
    reverse=False,
    implementation=None,
):
    """Computes all states of a diagonal linear recurrence on complex numbers.

    ```
    h_t = exp(log_a_t + i phase_t) * h_{t-1} + x_t
    ```

    The recurrence of the complex-gated unit of De et al. 2024 (arXiv:2402.19427, appendix B). A
    complex vector of D numbers is stored as 2D real numbers: the real parts, then the imaginary
    parts.

    A NaN or an infinity propagates as in `keras_recurrent.ops.linear_scan`.

    Args:
        x: `[B, T, 2D]`, float16, bfloat16, float32 or float64.
        log_a: `[B, T, D]`, the natural logarithm of the decays' magnitudes, at most 0; -inf is a
            decay of 0.
        phase: `[B, T, D]`, the decays' angles in radians.
        initial_state: `[B, 2D]`, h before the first token; None: zeros.
        mask, segment_ids, previous_segment_id, token_kind, reverse, implementation: as in
            `keras_recurrent.ops.linear_scan`.

    Returns:
        `(output, final_state)`: h as `[B, T, 2D]` in the dtype of `x`, and the last h as
        `[B, 2D]`. States and sums are float32, or float64 if a tensor is. Both carry gradients.

    Raises:
        ValueError, NotImplementedError: as in `keras_recurrent.ops.linear_scan`.

    Example: a quarter turn per token.

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import complex_linear_scan
    >>> x = np.array([[[1, 0], [0, 0], [0, 0]]], "float32")
    >>> quarter = np.full((1, 3, 1), np.pi / 2, "float32")
    >>> h, state = complex_linear_scan(x, np.zeros((1, 3, 1), "float32"), quarter)
    >>> keras.ops.convert_to_numpy(h).round(3) + 0
    array([[[ 1.,  0.],
            [ 0.,  1.],
            [-1.,  0.]]], dtype=float32)
    """
