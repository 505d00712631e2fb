"""A token of attention to a window of those before, for a step of generation."""

import keras
from keras import ops

from keras_recurrent.ops.operation import Operation


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LocalAttentionStepOperation(Operation):
    function = "local_attention_step"
    options = {"sliding_window": None}
    context = {"token_kind": "B"}

    @classmethod
    def check(cls, tensors, context, options):
        window = options["sliding_window"]
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(
                "`local_attention_step`: `sliding_window` must be an integer, at least 1, or None; "
                f"got {window!r}."
            )
        sizes = super().check(tensors, context, options)
        if sizes["H"] % sizes["G"]:
            raise ValueError(
                f"`local_attention_step`: the number of heads of `k` and `v`, {sizes['G']}, must "
                f"divide that of `q`, {sizes['H']}: an equal number of these share each."
            )
        if sizes.get("R") and 2 * sizes["R"] > sizes["K"]:
            raise ValueError(
                "`local_attention_step`: `frequencies` turn two channels each, and a head has "
                f"{sizes['K']}; got {sizes['R']}."
            )
        return sizes

    @classmethod
    def lower(cls, tensors, context, options):
        frequencies = tensors["frequencies"]
        if frequencies is not None and frequencies.shape[0] == 0:
            tensors = {**tensors, "frequencies": None}
        position = ops.cast(tensors["position"], "int32")
        # As in a layer, a state has the dtypes of keys and values.
        key, value = (
            ops.cast(tensors[ring], tensors[x].dtype) for ring, x in (("key", "k"), ("value", "v"))
        )
        return {**tensors, "key": key, "value": value, "position": position, **context, **options}


def local_attention_step(
    q,
    k,
    v,
    key,
    value,
    position,
    *,
    frequencies=None,
    sliding_window=None,
    token_kind=None,
    implementation=None,
):
    """A token of attention to a window of those before, between its linear maps.

    ```
    o = Σ_s softmax_s(q' · k_s) v_s                   p - sliding_window < s <= p
    q' = rotate(q, p) / sqrt(K),  k_p = rotate(k, p)
    ```

    The local attention of De et al. 2024 (arXiv:2402.19427, section 2.3), with the rotary positions
    of Su et al. 2021 (arXiv:2104.09864): channels j and j + R are a pair, which turns by
    p frequencies_j. p is the token's position in its document. The state is that of
    `keras_recurrent.ops.sliding_window_attention`, a ring of the document's last C tokens. The
    kernel for NVIDIA GPUs has no gradient: where one is asked for, the plain implementation runs,
    which has.

    Args:
        q: `[B, H, K]`, queries: float16, bfloat16, float32 or float64.
        k: `[B, G, K]`, keys; G divides H, and H / G consecutive heads of queries share one.
        v: `[B, G, V]`, values.
        key, value: `[B, C, G, K]` and `[B, C, G, V]`, the keys, turned, and values of the tokens
            before: the one at position s in slot s mod C, and 0 in a slot without a token.
        position: integers `[B]`, p, where the token goes on in its document.
        frequencies: `[R]`, in radians a token, R at most K / 2; None: nothing turns.
        sliding_window: integer, how many tokens each sees, itself included; None: all in the state.
        token_kind: int8 `[B]`, as in `keras_recurrent.ops.token_kind`; None: all tokens go on. A
            first token of a document is at position 0 and empties the state.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        `(o [B, H, V] in the dtype of q, key, value)`, the latter two with this token, in the dtypes
        of k and v. Logits and sums are float32, or float64 if a tensor is; q' and k_p have the
        dtypes of q and k.

    Raises:
        ValueError: a shape or dtype does not fit, G does not divide H, `sliding_window` is no
            integer from 1 on, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: the first token sees itself alone.

    >>> import numpy as np
    >>> from keras_recurrent.ops import local_attention_step
    >>> q = k = np.ones((1, 1, 2), "float32")
    >>> ring, v = np.zeros((1, 3, 1, 2), "float32"), np.array([[[5, 7]]], "float32")
    >>> o, key, value = local_attention_step(q, k, v, ring, ring, np.zeros(1, "int32"))
    >>> np.array(o).ravel(), np.array(value)[0, 0]
    (array([5., 7.], dtype=float32), array([[5., 7.]], dtype=float32))
    """
    tensors = {"q": q, "k": k, "v": v, "key": key, "value": value}
    tensors |= {"position": position, "frequencies": frequencies}
    options = {"sliding_window": sliding_window}
    return LocalAttentionStepOperation.apply(
        tensors, implementation, options, token_kind=token_kind
    )
