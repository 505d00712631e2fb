"""Causal softmax attention to a window of the tokens before, or to all of them."""

import keras

from keras_recurrent.ops.recurrent_operation import RecurrentOperation


@keras.saving.register_keras_serializable(package="keras_recurrent")
class SlidingWindowAttentionOperation(RecurrentOperation):
    function = "sliding_window_attention"
    options = RecurrentOperation.options | {"sliding_window": None, "max_length": None}

    def output_spec(self, tensors, sizes):
        sizes.setdefault("C", self._room(self.options))
        output, state = super().output_spec(tensors, sizes)
        return output, {} if sizes["C"] is None else state

    @classmethod
    def lower(cls, tensors, context, options):
        arguments = super().lower(tensors, context, options)
        del arguments["max_length"]
        return {**arguments, "capacity": cls._room(options)}

    @staticmethod
    def _room(options):
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
        sizes = super().check(tensors, context, options)
        heads, groups = sizes["H"], sizes["G"]
        if heads % groups:
            raise ValueError(
                f"`{cls.function}`: the number of heads of `k` and `v`, {groups}, must divide that "
                f"of `q`, {heads}: an equal number of these share each."
            )
        return sizes


def capacity(sliding_window, max_length):
    """How many tokens a new state has room for; None: nothing bounds them."""
    if sliding_window is None:
        return max_length
    return sliding_window - 1 if max_length is None else min(max_length, sliding_window - 1)


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
    """Causal softmax attention to a window of the tokens before, or to all of them.

    ```
    o_t = sum_s p_ts v_s,   p_ts = softmax over s of q_t · k_s,   t - sliding_window < s <= t
    ```

    The local attention of De et al. 2024 (arXiv:2402.19427, section 2.3) and, without a window,
    the usual one. Queries come in H heads, keys and values in G of them, each shared by H / G
    consecutive heads of queries: with G = 1 it is multi-query attention (Shazeer 2019,
    arXiv:1911.02150), between 1 and H grouped-query attention (Ainslie et al. 2023,
    arXiv:2305.13245). Queries are not scaled here.

    t and s count the real tokens of a document: padding and other documents are not seen, and
    take no room in the window. Time grows as T times the window, memory as T.

    A NaN or an infinity in a query reaches the output of its own token alone, and in a key those of
    the tokens that see it. In a value it may reach every output of its row and of the heads that
    share it, also of earlier tokens and of other documents: blocks of tokens are multiplied at
    once, and a weight of 0 times NaN is NaN. The gradients of the same row may all be lost. Other
    rows are not touched. Padding may hold anything.

    The state is a ring of the document's last C tokens. The one at position p of its document,
    from 0 on, is in slot p mod C; slots without a token are zero. A new document empties it.
    Keys and values keep their dtype: what was computed in bfloat16 gains nothing in float32.

    Args:
        q: `[B, T, H, K]`, float16, bfloat16, float32 or float64.
        k: `[B, T, G, K]`; G divides H.
        v: `[B, T, G, V]`.
        sliding_window: integer, how many tokens each sees, itself included; None: all before it.
        max_length: integer, the tokens of a document that the returned state has room for. A
            window needs no more than `sliding_window - 1`, and without `max_length` gets them.
            Where neither is given, nor an `initial_state`, the state returned is an empty dict,
            from which nothing can go on. Once a document is longer than its state, the state
            keeps its last tokens.
        initial_state: a state `{"key": [B, C, G, K], "value": [B, C, G, V], "position": [B]}`;
            `position` is that of the token to come: it tells which slots are filled. (A layer's
            state has it once, at the top, beside `segment`.) The state returned has the same C.
            None: nothing was seen.
        mask, segment_ids, previous_segment_id, token_kind, reverse, implementation: as in
            `keras_recurrent.ops.linear_scan`.

    Returns:
        `(output, final_state)`: o as `[B, T, H, V]` in the dtype of `q`, and the state, `key` and
        `value` in the dtypes of `k` and `v`, `position` int32. Logits and sums are float32, or
        float64 if a tensor is. Gradients flow through the output and the state's keys and values.

    Raises:
        ValueError: a shape or dtype does not fit, `q` has no token, a tensor is empty along another
            axis, G does not divide H, `sliding_window` or `max_length` is no integer from 1 on, or
            the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: equal keys, so each token sees the mean of itself and the one before.

    >>> import numpy as np
    >>> from keras_recurrent.ops import sliding_window_attention
    >>> q = k = np.ones((1, 4, 1, 2), "float32")
    >>> v = np.array([[[[1]], [[3]], [[5]], [[9]]]], "float32")
    >>> o, state = sliding_window_attention(q, k, v, sliding_window=2)
    >>> np.array(o).ravel()
    array([1., 2., 4., 7.], dtype=float32)
    >>> np.array(state["value"]).ravel(), np.array(state["position"])
    (array([9.], dtype=float32), array([4], dtype=int32))
    """
    return SlidingWindowAttentionOperation.apply(
        {"q": q, "k": k, "v": v},
        implementation,
        {"reverse": reverse, "sliding_window": sliding_window, "max_length": max_length},
        initial_state=initial_state,
        mask=mask,
        segment_ids=segment_ids,
        previous_segment_id=previous_segment_id,
        token_kind=token_kind,
    )
