"""Linear attention with one constant decay a head."""

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
    """Linear attention whose memory, one matrix a head, forgets at a constant rate.

    ```
    S_t = exp(log_decay) S_{t-1} + k_t v_t^T
    o_t = S_t^T q_t
    ```

    Lightning Attention (Qin et al. 2024, arXiv:2405.17381) as TransNormerLLM has it (Qin et al.
    2023, arXiv:2307.14995). Queries are not scaled. Tokens are worked on in chunks, by matrix
    products: (Q K^T) V inside a chunk, Q (K^T V) across chunks; all but the arguments is
    recomputed for the gradient. Padding does not decay the memory.

    A NaN or an infinity in a token's query reaches the output of that token alone. In its key or
    value it reaches, within its row and head, the outputs of all later tokens, those of later
    documents too, and of up to 127 tokens before it, in its chunk: it is multiplied with weights of
    0, and 0 times NaN is NaN. The gradients of the same row and head may all be lost. Other rows
    and heads are not touched. Padding may hold anything.

    Args:
        q: `[B, T, H, K]`, the queries: float16, bfloat16, float32 or float64.
        k: `[B, T, H, K]`, the keys.
        v: `[B, T, H, V]`, the values. V may differ from K.
        log_decay: `[H]`, the natural logarithm of each head's decay a token, at most 0. A
            constant: its gradient is 0.
        initial_state: `[B, H, K, V]`, S before the first token; None: zeros.
        mask, segment_ids, previous_segment_id, token_kind, reverse, implementation: as in
            `keras_recurrent.ops.linear_scan`.

    Returns:
        `(output, final_state)`: o as `[B, T, H, V]` in the dtype of `v`, and the last S as
        `[B, H, K, V]`. States and sums are float32, or float64 if a tensor is, also where the
        tensors have 16 bits, and so are products but those of the kernels for GPUs. Both carry
        gradients. The output at padding is finite, and says nothing.

    Raises:
        ValueError: a shape or dtype does not fit, `q` has no token, a tensor is empty along another
            axis, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: what was seen fades by half a token.

    >>> import numpy as np
    >>> from keras_recurrent.ops import lightning_attention
    >>> q = np.ones((1, 3, 1, 1), "float32")
    >>> k = np.array([1, 0, 0], "float32").reshape(1, 3, 1, 1)
    >>> v = np.array([8, 0, 0], "float32").reshape(1, 3, 1, 1)
    >>> output, state = lightning_attention(q, k, v, np.log([0.5]).astype("float32"))
    >>> np.array(output).ravel().round(3)
    array([8., 4., 2.], dtype=float32)
    """
    return LightningAttentionOperation.apply(
        {"q": q, "k": k, "v": v, "log_decay": log_decay},
        implementation,
        {"reverse": reverse},
        initial_state=initial_state,
        mask=mask,
        segment_ids=segment_ids,
        previous_segment_id=previous_segment_id,
        token_kind=token_kind,
    )
