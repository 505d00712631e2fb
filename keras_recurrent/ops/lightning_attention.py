"""Linear attention with one constant decay per head."""

from keras_recurrent.ops.recurrent_operation import RecurrentOperation


class LightningAttentionOperation(RecurrentOperation):
    function = "lightning_attention"


@LightningAttentionOperation.public_function
def lightning_attention(
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
    """Computes linear attention whose memory, a matrix per head, decays at a constant rate.

    ```
    S_t = exp(log_decay) S_{t-1} + k_t v_t^T
    o_t = S_t^T q_t
    ```

    Lightning Attention (Qin et al. 2024, arXiv:2405.17381) of TransNormerLLM (Qin et al. 2023,
    arXiv:2307.14995). Queries are not scaled. Tokens are processed in chunks, by matrix products:
    (Q K^T) V inside a chunk, Q (K^T V) across chunks; the gradient recomputes everything except the
    arguments. Padding does not decay the memory.

    A NaN or an infinity propagates as in `keras_recurrent.ops.gated_linear_attention`.

    Args:
        q: `[B, T, H, K]`, the queries: float16, bfloat16, float32 or float64.
        k: `[B, T, H, K]`, the keys.
        v: `[B, T, H, V]`, the values. V may differ from K.
        log_decay: `[H]`, the natural logarithm of each head's decay per token, at most 0. A
            constant: its gradient is 0.
        initial_state: `[B, H, K, V]`, S before the first token; None: zeros.
        mask, segment_ids, previous_segment_id, token_kind, reverse, implementation: as in
            `keras_recurrent.ops.linear_scan`.

    Returns:
        `(output, final_state)`, as in `keras_recurrent.ops.gated_linear_attention`.

    Raises:
        ValueError, NotImplementedError: as in `keras_recurrent.ops.linear_scan`.

    Example: the memory decays by half per token.

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import lightning_attention
    >>> q = np.ones((1, 3, 1, 1), "float32")
    >>> k = np.array([1, 0, 0], "float32").reshape(1, 3, 1, 1)
    >>> v = np.array([8, 0, 0], "float32").reshape(1, 3, 1, 1)
    >>> output, state = lightning_attention(q, k, v, np.log([0.5]).astype("float32"))
    >>> keras.ops.convert_to_numpy(output).ravel().round(3)
    array([8., 4., 2.], dtype=float32)
    """
