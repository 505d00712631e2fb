"""Diagonal linear recurrence."""

from keras_recurrent.ops.recurrent_operation import RecurrentOperation


class LinearScan(RecurrentOperation):
    function = "linear_scan"


@LinearScan.public_function
def linear_scan(
    x,
    log_a,
    *,
    initial_state=None,
    mask=None,
    segment_ids=None,
    previous_segment_id=None,
    token_kind=None,
    reverse=False,
    implementation=None,
):
    """Computes all states of a diagonal linear recurrence.

    ```
    h_t = exp(log_a_t) * h_{t-1} + x_t
    ```

    The recurrence of De et al. 2024 (arXiv:2402.19427, section 2.4) and of similar networks; `x`
    and `log_a` include all gates and multipliers. The gradient recomputes everything except the
    arguments and the output.

    A NaN or an infinity reaches the states of its token and of all later tokens in its sequence and
    channel, including later documents, because 0 times NaN is NaN; all gradients of the same
    channel may become NaN. Other sequences and channels are not affected. Padding may contain
    anything.

    Args:
        x: `[B, T, D]`, float16, bfloat16, float32 or float64.
        log_a: `[B, T, D]`, the natural logarithm of the decays, at most 0; -inf is a decay of 0.
            May be float32 if `x` has 16 bits.
        initial_state: `[B, D]`, h before the first token; None: zeros.
        mask: boolean `[B, T]`, or integers, False or 0 at padding, which may be at any position: a
            padding token does not change the state. None: all tokens are real.
        segment_ids: integers `[B, T]`, at least 0: a token is independent of those of other
            segments (packed documents). None: one document. For negative numbers, see
            `keras_recurrent.ops.token_kind`.
        previous_segment_id: int32 `[B]`, the segment of the last real token before this sequence,
            -1 if there is none. None: -1 without an `initial_state`; with one, the first real token
            continues from it.
        token_kind: int8 `[B, T]`, the result of `keras_recurrent.ops.token_kind`, which replaces
            the three arguments above in several operations on the same tokens. Not supported with
            `reverse`.
        reverse: boolean, whether to run from the last token to the first.
        implementation: string, the only implementation to run, a folder of `backends/`. None: the
            fastest that accepts the arguments (see `keras_recurrent.which_implementation`).

    Returns:
        `(output, final_state)`: h as `[B, T, D]` in the dtype of `x`, and the last h as `[B, D]`.
        States and sums are float32, or float64 if a tensor is. Both carry gradients.

    Raises:
        ValueError: a shape or dtype does not fit, `x` has no token, a tensor is empty along another
            axis, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import linear_scan
    >>> x = np.ones((1, 3, 1), "float32")
    >>> log_a = np.full((1, 3, 1), np.log(0.5), "float32")
    >>> h, state = linear_scan(x, log_a)
    >>> keras.ops.convert_to_numpy(h).ravel()
    array([1.  , 1.5 , 1.75], dtype=float32)
    """
