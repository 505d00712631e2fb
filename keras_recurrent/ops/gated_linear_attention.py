"""Linear attention with a decay per key channel and token."""

from keras_recurrent.ops.recurrent_operation import RecurrentOperation


class GatedLinearAttentionOperation(RecurrentOperation):
    function = "gated_linear_attention"


@GatedLinearAttentionOperation.public_function
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
    """Computes linear attention whose memory, a matrix per head, decays per key channel.

    ```
    S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T
    o_t = S_t^T q_t
    ```

    The recurrence of HGRN2 (Qin et al. 2024, arXiv:2404.07904, section 3), whose keys are 1 - f,
    and of gated linear attention (Yang et al. 2023, arXiv:2312.06635). Queries are not scaled.
    Tokens are processed in chunks, by matrix products; the gradient recomputes everything except
    the arguments. Decays may have any value from 0 to 1, inclusive; their products neither overflow
    nor become NaN.

    A NaN or an infinity in a token's query reaches only the output of that token. In its key, value
    or decay it reaches, within its sequence and head, the outputs of all later tokens, including
    later documents, and of up to 127 earlier tokens in its chunk: it is multiplied by weights of 0,
    and 0 times NaN is NaN. All gradients of the same sequence and head may become NaN. Other
    sequences and heads are not affected. Padding may contain anything.

    Args:
        q: `[B, T, H, K]`, the queries: float16, bfloat16, float32 or float64.
        k: `[B, T, H, K]`, the keys; None: `1 - exp(log_f)`, which is never stored.
        v: `[B, T, H, V]`, the values. V may differ from K.
        log_f: `[B, T, H, K]`, the natural logarithm of the decays, at most 0; -inf is a decay of 0.
            May be float32 if other tensors have 16 bits.
        initial_state: `[B, H, K, V]`, S before the first token; None: zeros.
        mask, segment_ids, previous_segment_id, token_kind, reverse, implementation: as in
            `keras_recurrent.ops.linear_scan`.

    Returns:
        `(output, final_state)`: o as `[B, T, H, V]` in the dtype of `v`, and the last S as
        `[B, H, K, V]`. States, sums and products are float32, or float64 if a tensor is, even for
        16-bit tensors; only the products of the GPU kernels may have 16 bits. Both results carry
        gradients. The output at padding is finite and otherwise arbitrary.

    Raises:
        ValueError, NotImplementedError: as in `keras_recurrent.ops.linear_scan`.

    Example: a value is stored, then read after a decay of 1/2, and after a reset.

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import gated_linear_attention
    >>> q = np.ones((1, 3, 1, 1), "float32")
    >>> k = np.array([1, 0, 0], "float32").reshape(1, 3, 1, 1)
    >>> v = np.array([[7, 9], [0, 0], [0, 0]], "float32").reshape(1, 3, 1, 2)
    >>> log_f = np.array([0, np.log(0.5), -np.inf], "float32").reshape(1, 3, 1, 1)
    >>> output, state = gated_linear_attention(q, k, v, log_f)
    >>> keras.ops.convert_to_numpy(output)[0, :, 0].round(3)
    array([[7. , 9. ],
           [3.5, 4.5],
           [0. , 0. ]], dtype=float32)
    """
