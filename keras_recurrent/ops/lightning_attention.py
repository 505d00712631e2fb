"""Linear attention with one constant decay per head."""

import keras

from keras_recurrent.ops.recurrent_operation import RecurrentOperation


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LightningAttentionOperation(RecurrentOperation):
    function = "lightning_attention"


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

    A NaN or an infinity in a token's query reaches only the output of that token. In its key or
    value it reaches, within its sequence and head, the outputs of all later tokens, including later
    documents, and of up to 127 earlier tokens in its chunk: it is multiplied by weights of 0, and 0
    times NaN is NaN. All gradients of the same sequence and head may become NaN. Other sequences
    and heads are not affected. Padding may contain anything.

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
        `(output, final_state)`: o as `[B, T, H, V]` in the dtype of `v`, and the last S as
        `[B, H, K, V]`. States, sums and products are float32, or float64 if a tensor is, even for
        16-bit tensors; only the products of the GPU kernels may have 16 bits. Both results carry
        gradients. The output at padding is finite and otherwise arbitrary.

    Raises:
        ValueError: a shape or dtype does not fit, `q` has no token, a tensor is empty along another
            axis, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

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
    return LightningAttentionOperation.apply(locals())
