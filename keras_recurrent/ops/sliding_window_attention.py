"""Causal softmax attention to a sliding window, or to all earlier tokens."""

from keras_recurrent.ops.recurrent_operation import RecurrentOperation


class SlidingWindowAttentionOperation(RecurrentOperation):
    function = "sliding_window_attention"
    options = RecurrentOperation.options | {"sliding_window": None, "max_length": None}

    def output_spec(self, tensors, sizes):
        sizes.setdefault("C", self._capacity(self.options))
        output, state = super().output_spec(tensors, sizes)
        return output, {} if sizes["C"] is None else state

    @classmethod
    def lower(cls, tensors, context, options):
        arguments = super().lower(tensors, context, options)
        del arguments["max_length"]
        return {**arguments, "capacity": cls._capacity(options)}

    @staticmethod
    def _capacity(options):
        return capacity(options["sliding_window"], options["max_length"])

    @classmethod
    def check(cls, tensors, context, options):
        for name in ("sliding_window", "max_length"):
            number = options[name]
            if number is not None and (type(number) is not int or number < 1):
                raise ValueError(
                    f"`{cls.function}`: `{name}` must be an integer, at least 1, or None; got "
                    f"{number!r}."
                )
        return super().check(tensors, context, options)


def capacity(sliding_window, max_length):
    """Returns the capacity of a new KV cache in tokens; None if it is unlimited."""
    if sliding_window is None:
        return max_length
    return sliding_window - 1 if max_length is None else min(max_length, sliding_window - 1)


@SlidingWindowAttentionOperation.public_function
def sliding_window_attention(
    q,
    k,
    v,
    sliding_window=None,
    *,
    max_length=None,
    initial_state=None,
    mask=None,
    segment_ids=None,
    previous_segment_id=None,
    token_kind=None,
    reverse=False,
    implementation=None,
):
    """Computes causal softmax attention to a sliding window, or to all earlier tokens.

    ```
    o_t = sum_s p_ts v_s,   p_ts = softmax over s of q_t · k_s,   t - sliding_window < s <= t
    ```

    The local attention of De et al. 2024 (arXiv:2402.19427, section 2.3) and, without a window,
    global causal attention. There are H query heads and G key and value heads, each shared by H / G
    consecutive query heads: G = 1 is multi-query attention (Shazeer 2019, arXiv:1911.02150), G
    between 1 and H is grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245). Queries are
    not scaled.

    t and s count the real tokens of a document: tokens do not attend to padding or to other
    documents, and neither occupies the window. Time grows with T times the window, memory with T.

    A NaN or an infinity in a query reaches only the output of its token, and in a key only those of
    the tokens that attend to it. In a value it may reach all outputs of its sequence and of the
    heads that share it, including earlier tokens and other documents: blocks of tokens are
    multiplied at once, and a weight of 0 times NaN is NaN. All gradients of the same sequence may
    become NaN. Other sequences are not affected. Padding may contain anything.

    The state is a circular KV cache of the document's last C tokens. The token at position p of its
    document, from 0, is in slot p mod C; empty slots are zero. A new document clears it. Keys and
    values are stored in their dtype, because float32 would not add precision.

    Args:
        q: `[B, T, H, K]`, float16, bfloat16, float32 or float64.
        k: `[B, T, G, K]`; G divides H.
        v: `[B, T, G, V]`.
        sliding_window: integer, the number of tokens that each token attends to, including itself.
            None: all earlier tokens and itself.
        max_length: integer, the capacity of the returned state, in tokens of a document. With a
            window, the capacity is at most `sliding_window - 1`, which is the default. If
            `sliding_window`, `max_length` and `initial_state` are all None, the returned state is
            an empty dict, from which a call cannot continue. If a document exceeds the capacity,
            the state keeps its last tokens.
        initial_state: a state `{"key": [B, C, G, K], "value": [B, C, G, V], "position": [B]}`.
            `position` is that of the next token and determines the filled slots. (The state of a
            layer has it only once, at the top level, next to `segment`.) The returned state has the
            same C. None: the first token starts a document.
        mask, segment_ids, previous_segment_id, token_kind, reverse, implementation: as in
            `keras_recurrent.ops.linear_scan`.

    Returns:
        `(output, final_state)`: o as `[B, T, H, V]` in the dtype of `q`, and the state, `key` and
        `value` in the dtypes of `k` and `v`, `position` int32. Logits and sums are float32, or
        float64 if a tensor is. Gradients flow through the output and the state's keys and values.

    Raises:
        ValueError: a shape or dtype does not fit, `q` has no token, a tensor is empty along another
            axis, G does not divide H, `sliding_window` or `max_length` is not an integer of at
            least 1, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: equal keys, so each output is the mean of a value and the one before.

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import sliding_window_attention
    >>> q = k = np.ones((1, 4, 1, 2), "float32")
    >>> v = np.array([[[[1]], [[3]], [[5]], [[9]]]], "float32")
    >>> o, state = sliding_window_attention(q, k, v, sliding_window=2)
    >>> keras.ops.convert_to_numpy(o).ravel()
    array([1., 2., 4., 7.], dtype=float32)
    >>> keras.ops.convert_to_numpy(state["value"]).ravel(), int(state["position"][0])
    (array([9.], dtype=float32), 4)
    """
