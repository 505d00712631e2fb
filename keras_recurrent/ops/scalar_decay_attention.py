"""Linear attention with a decay per head and token."""

from keras_recurrent.ops.recurrent_operation import RecurrentOperation


class ScalarDecayAttentionOperation(RecurrentOperation):
    function = "scalar_decay_attention"


@ScalarDecayAttentionOperation.public_function
def scalar_decay_attention(
    q,
    k,
    v,
    log_decay,
    *,
    initial_state=None,
    mask=None,
    segment_ids=None,
    previous_segment_id=None,
    token_kind=None,
    reverse=False,
    implementation=None,
):
    """Computes linear attention with one decay per head and token, for the whole memory.

    ```
    S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T
    o_t = S_t^T q_t
    ```

    The recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), whose q, k and v are C, B, and
    X times the step size. S, the memory, is a matrix per head. Groups of heads share queries and
    keys: head h has the query and key of group h // (H / G). Queries are not scaled. Tokens are
    processed in chunks, by matrix products. The backward pass recomputes everything except the
    arguments. Decays may have any value from 0 to 1, inclusive; their products neither overflow nor
    become NaN.

    A NaN or an infinity propagates as in `keras_recurrent.ops.gated_linear_attention`, within a
    group of heads.

    Args:
        q: `[B, T, G, K]`, the queries: float16, bfloat16, float32 or float64.
        k: `[B, T, G, K]`, the keys.
        v: `[B, T, H, V]`, the values. G divides H. V may differ from K.
        log_decay: `[B, T, H]`, the natural logarithm of the decays, at most 0; -inf is a decay of
            0. May be float32 if other tensors have 16 bits.
        initial_state: `[B, H, K, V]`, S before the first token; None: zeros.
        mask, segment_ids, previous_segment_id, token_kind, reverse, implementation: as in
            `keras_recurrent.ops.linear_scan`.

    Returns:
        `(output, final_state)`, as in `keras_recurrent.ops.gated_linear_attention`.

    Raises:
        ValueError: a shape or dtype does not fit, `q` has no token, a tensor is empty along another
            axis, G does not divide H, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: two heads share a key; the second head halves its memory at the second token.

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import scalar_decay_attention
    >>> q = np.ones((1, 2, 1, 1), "float32")
    >>> k = np.array([1, 0], "float32").reshape(1, 2, 1, 1)
    >>> v = np.array([[8, 8], [0, 0]], "float32").reshape(1, 2, 2, 1)
    >>> log_decay = np.log([[[1, 1], [1, 0.5]]]).astype("float32")
    >>> output, state = scalar_decay_attention(q, k, v, log_decay)
    >>> keras.ops.convert_to_numpy(output)[0, :, :, 0].round(3)
    array([[8., 8.],
           [8., 4.]], dtype=float32)
    """
