"""Linear attention with a decay for every key channel and token."""

import keras

from keras_recurrent.ops.recurrent_operation import RecurrentOperation


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GatedLinearAttentionOperation(RecurrentOperation):
    function = "gated_linear_attention"


def gated_linear_attention(
    q,
    k,
    v,
    log_f,
    *,
    initial_state=None,
    mask=None,
    segment_ids=None,
    previous_segment_id=None,
    token_kind=None,
    reverse=False,
    implementation=None,
):
    """Linear attention whose memory, one matrix a head, forgets channel by channel.

    ```
    S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T
    o_t = S_t^T q_t
    ```

    The recurrence of HGRN2 (Qin et al. 2024, arXiv:2404.07904, section 3), whose keys are 1 - f,
    and of gated linear attention (Yang et al. 2023, arXiv:2312.06635). Queries are not scaled.
    Tokens are worked on in chunks, by matrix products; all but the arguments is recomputed for the
    gradient. Any decay is safe, from exactly 0 to exactly 1, and so is any product of them.

    A NaN or an infinity in a token's query reaches the output of that token alone. In its key,
    value or decay it reaches, within its row and head, the outputs of all later tokens, those of
    later documents too, and of up to 127 tokens before it, in its chunk: it is multiplied with
    weights of 0, and 0 times NaN is NaN. The gradients of the same row and head may all be lost.
    Other rows and heads are not touched. Padding may hold anything.

    Args:
        q: `[B, T, H, K]`, the queries: float16, bfloat16, float32 or float64.
        k: `[B, T, H, K]`, the keys; None: `1 - exp(log_f)`, which is never stored.
        v: `[B, T, H, V]`, the values. V may differ from K.
        log_f: `[B, T, H, K]`, the natural logarithm of the decays: at most 0, and -inf forgets
            all. May be float32 beside tensors of 16 bits.
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

    Example: remember, recall at half strength, and recall after a reset.

    >>> import numpy as np
    >>> from keras_recurrent.ops import gated_linear_attention
    >>> q = np.ones((1, 3, 1, 1), "float32")
    >>> k = np.array([1, 0, 0], "float32").reshape(1, 3, 1, 1)
    >>> v = np.array([[7, 9], [0, 0], [0, 0]], "float32").reshape(1, 3, 1, 2)
    >>> log_f = np.array([0, np.log(0.5), -np.inf], "float32").reshape(1, 3, 1, 1)
    >>> output, state = gated_linear_attention(q, k, v, log_f)
    >>> np.array(output)[0, :, 0].round(3)
    array([[7. , 9. ],
           [3.5, 4.5],
           [0. , 0. ]], dtype=float32)
    """
    return GatedLinearAttentionOperation.apply(
        {"q": q, "k": k, "v": v, "log_f": log_f},
        implementation,
        {"reverse": reverse},
        initial_state=initial_state,
        mask=mask,
        segment_ids=segment_ids,
        previous_segment_id=previous_segment_id,
        token_kind=token_kind,
    )
