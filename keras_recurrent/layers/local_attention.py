"""Causal attention of Griffin, to a sliding window or to all earlier tokens."""

import math

import keras
from keras import ops

from keras_recurrent.checks.arguments import (
    check_booleans,
    check_divides,
    check_factors,
    check_number,
    check_positive_integer,
    check_positive_integers,
    is_finite_number,
)
from keras_recurrent.checks.shapes import reshape
from keras_recurrent.devices.jax_layouts import check_whole_sequences
from keras_recurrent.layers import decoding
from keras_recurrent.layers.base import cast
from keras_recurrent.layers.heads import HeadsLayer, frequencies, rotate
from keras_recurrent.ops.decoding_steps import local_attention_step
from keras_recurrent.ops.sliding_window_attention import capacity, sliding_window_attention


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LocalAttention(HeadsLayer):
    """Causal multi-query or grouped-query attention with rotary positions and a KV cache.

    ```
    q_t, k_t = rotate(W_q x_t, t) / sqrt(head_dim), rotate(W_k x_t, t);   v_t = W_v x_t
    o_t = sum_s softmax_s(q_t · k_s) v_s                t - sliding_window < s <= t
    y_t = W_o o_t + b_o
    ```

    The attention block of De et al. 2024 (arXiv:2402.19427, section 2.3): local with a window, in
    Griffin; global without one, in the paper's Transformer baseline. Keys and values have fewer
    heads than queries: one in multi-query attention (Shazeer 2019, arXiv:1911.02150), more in
    grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245). The positions are rotary (Su et
    al. 2021, arXiv:2104.09864).

    t and s count the real tokens of a document: positions start at 0 in each document, and padding
    does not occupy the window. Time grows with T times the window. The state is a circular KV cache
    of the document's last tokens. With a window, its size and the cost of a decoding step do not
    depend on the length.

    Options of other models, all off by default; σ is the sigmoid:

    ```
    use_qk_norm      q_t, k_t = RMSNorm(W_q x_t), RMSNorm(W_k x_t) in each head, before `rotate`
    logit_scaling    q_t = q_t ln(t + a) / ln(floor(a)), for a number a
    use_output_gate  y_t = W_o (o_t * σ(W_g x_t)) + b_o
    ```

    HypeNet has all three, without rotary positions (Chen et al. 2026, arXiv:2601.22156, and its
    code, thunlp/hybrid-linear-attention). A logit scale that grows with the position keeps
    attention focused in documents longer than those of training.

    Args:
        num_query_heads: integer, the number of query heads.
        num_key_value_heads: integer, the number of key and value heads; must divide
            `num_query_heads`.
        head_dim: integer, the size of a head.
        sliding_window: integer, the number of tokens that each token attends to, including itself.
            None: all earlier tokens and itself.
        max_length: integer, the capacity of a state, in tokens of a document. Required for
            streaming without a window, here or in `get_initial_state`; with a window, a state needs
            at most `sliding_window - 1`. After each call, a state drops the oldest tokens of a
            document that exceeds it; results then depend on how the sequence was split.
        rope_max_wavelength: number; channels j and j + r / 2 are a pair, which rotates by
            `rope_max_wavelength^(-2j / r)` radians per token, where r is the number of rotated
            channels.
        partial_rotary_factor: float, the fraction of a head's channels that are rotated, which are
            the first ones. 0: no positions.
        use_qkv_bias: boolean, whether the projections to queries, keys and values have biases.
        use_output_bias: boolean, whether the output has the bias b_o.
        use_qk_norm: boolean, whether each head of queries and keys is normalized, with weights
            `[head_dim]` that all heads share.
        use_output_gate: boolean, whether the outputs of the heads have a gate; see above.
        query_scale: number, the factor of the logits. None: 1 / sqrt(head_dim).
        logit_scaling: number a, at least 2, for a logit scale that grows with the position; see
            above. None: a constant scale.
        layer_norm_epsilon: float, ε of the norms of queries and keys.
        kernel_initializer: initializer of the kernels.
        bias_initializer: initializer of the biases.

    Returns:
        y as `[B, T, D]` in the compute dtype. With `return_state` also the state: `{"key",
        "value": [B, C, num_key_value_heads, head_dim] in the compute dtype, "position": [B] int32,
        the position of the next token, "segment": [B] int32}`. The token at position p is in
        slot p mod C. C is that of `initial_state`, or else the smaller of `sliding_window - 1` and
        `max_length`. Logits and sums are float32 under a 16-bit policy.

    Sublayers: `q_proj`, `k_proj`, `v_proj` and `o_proj`, all `Dense`, with kernels
    `[D, heads * head_dim]`, and `[num_query_heads * head_dim, D]` in `o_proj`. With
    `use_output_gate` also `gate_proj`, a `Dense` without bias, with the kernel
    `[D, num_query_heads * head_dim]`; with `use_qk_norm` also `q_norm` and `k_norm`, both `RMSNorm`
    with weights around 1.

    Raises:
        ValueError: `num_key_value_heads` does not divide `num_query_heads`; `partial_rotary_factor`
            is not between 0 and 1, or the number of rotated channels is odd; `logit_scaling` is
            below 2; a number or boolean has another type; or a state is requested but neither
            `sliding_window` nor `max_length` limits it.
        NotImplementedError: `sliding_window` is None and a distribution splits sequences (see
            `keras_recurrent.devices.jax_layouts`).

    Example: a sequence longer than the window, in chunks.

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import LocalAttention

    layer = LocalAttention(num_query_heads=4, head_dim=8, sliding_window=16)
    x = np.random.normal(size=(2, 50, 32)).astype("float32")
    whole = keras.ops.convert_to_numpy(layer(x))

    state = layer.get_initial_state(batch_size=2)
    for chunk in np.split(x, 5, axis=1):
        output, state = layer(chunk, initial_state=state, return_state=True)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(output), whole[:, -10:], rtol=1e-4, atol=1e-5
    )
    assert tuple(state["key"].shape) == (2, 15, 1, 8)
    ```
    """

    def __init__(
        self,
        num_query_heads,
        *,
        num_key_value_heads=1,
        head_dim=128,
        sliding_window=None,
        max_length=None,
        rope_max_wavelength=10_000,
        partial_rotary_factor=1.0,
        use_qkv_bias=False,
        use_output_bias=True,
        use_qk_norm=False,
        use_output_gate=False,
        query_scale=None,
        logit_scaling=None,
        layer_norm_epsilon=1e-6,
        kernel_initializer="lecun_normal",
        bias_initializer="zeros",
        return_state=False,
        **kwargs,
    ):
        super().__init__(return_state=return_state, **kwargs)
        heads = {"num_query_heads": num_query_heads, "num_key_value_heads": num_key_value_heads}
        check_positive_integers(**heads, head_dim=head_dim)
        check_divides(
            "num_key_value_heads", num_key_value_heads, "`num_query_heads`", num_query_heads
        )
        if sliding_window is None:
            check_whole_sequences("`LocalAttention` without a `sliding_window`")
        self.rotary_dim = _rotary_dim(partial_rotary_factor, head_dim)
        check_number("rope_max_wavelength", rope_max_wavelength, above=0)
        check_booleans(use_qkv_bias=use_qkv_bias, use_output_bias=use_output_bias)
        check_booleans(use_qk_norm=use_qk_norm, use_output_gate=use_output_gate)
        check_number("layer_norm_epsilon", layer_norm_epsilon)
        check_factors(query_scale=query_scale)
        _check_logit_scaling(logit_scaling)
        sliding_window = _integer_or_none("sliding_window", sliding_window)
        max_length = _integer_or_none("max_length", max_length)
        self.store_arguments(LocalAttention, locals())
        inner, key_value = num_query_heads * head_dim, num_key_value_heads * head_dim
        self.q_proj = self.make_dense(inner, "q_proj", use_bias=use_qkv_bias)
        self.k_proj = self.make_dense(key_value, "k_proj", use_bias=use_qkv_bias)
        self.v_proj = self.make_dense(key_value, "v_proj", use_bias=use_qkv_bias)
        self.gate_proj = self.make_dense(inner, "gate_proj") if use_output_gate else None
        self.q_norm = self.make_norm("q_norm") if use_qk_norm else None
        self.k_norm = self.make_norm("k_norm") if use_qk_norm else None

    def stream(self, inputs, tokens, state):
        q, k, v = (self.inner(layer, inputs) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.attend(q, k, v, tokens, state)

    def finish(self, output, inputs):
        if self.gate_proj is not None:
            output = ops.multiply(output, ops.sigmoid(self.inner(self.gate_proj, inputs)))
        return self.inner(self.o_proj, output)

    def attend(self, q, k, v, tokens, state):
        """Returns the outputs of the heads `[B, T, heads * head_dim]` from the projections."""
        position = tokens.position
        output, after = sliding_window_attention(
            self._rotated(q, position, self.q_norm, self._logit_scale(position)),
            self._rotated(k, position, self.k_norm),
            # Keras on torch multiplies float64 as float32.
            cast(self.split_heads(v, position), self.compute_dtype),
            self.sliding_window,
            max_length=self.max_length if tokens.slots is None else tokens.slots.shape[1],
            # If the first token starts a document, the state is ignored and the position is 0.
            initial_state={**state, "position": position[:, 0]} if state else None,
            token_kind=tokens.kind,
        )
        after.pop("position", None)  # returned by the outermost layer
        inner = self.num_query_heads * self.head_dim
        return reshape(output, (*ops.shape(position), inner)), after

    def _rotated(self, x, position, norm, scale=1.0):
        x = self.split_heads(x, position)
        x = x if norm is None else self.inner(norm, x)
        x = ops.cast(x, self.state_dtype)
        x = rotate(x, position, self.rope_max_wavelength, self.rotary_dim)
        return cast(x * scale, self.compute_dtype)

    def _logit_scale(self, position):
        scale = self.head_dim**-0.5 if self.query_scale is None else self.query_scale
        if self.logit_scaling is None:
            return scale
        growth = ops.log(ops.cast(position, self.state_dtype) + self.logit_scaling)
        return growth[:, :, None, None] * (scale / math.log(math.floor(self.logit_scaling)))

    uses_position = True

    @property
    def keeps_state(self):
        return self.sliding_window is not None or self.max_length is not None

    def own_state_spec(self, batch_size=None):
        """Returns the layer's part of a state, as `KerasTensor`s.

        The capacity of the KV cache, C, is None even if `sliding_window` limits it: a state of
        `get_initial_state(max_length=...)` may have a smaller capacity, which calls preserve.
        """
        shape = (batch_size, None, self.num_key_value_heads, self.head_dim)
        return {name: keras.KerasTensor(shape, self.compute_dtype) for name in ("key", "value")}

    def own_initial_state(self, batch_size, max_length=None):
        """Returns the layer's part of `get_initial_state`.

        Its capacity is `max_length` tokens of a document (None: the layer's `max_length`), or that
        of the window if it is smaller.
        """
        slots = capacity(self.sliding_window, self.max_length if max_length is None else max_length)
        if slots is None:
            raise self.no_bound()
        shape = (batch_size, slots, self.num_key_value_heads, self.head_dim)
        return {name: ops.zeros(shape, self.compute_dtype) for name in ("key", "value")}

    def unfused_reason(self):
        return decoding.class_reason(self, LocalAttention) or super().unfused_reason()

    def projections(self):
        projections = self.q_proj, self.k_proj, self.v_proj, self.gate_proj
        return [projection for projection in projections if projection is not None]

    def fused_step(self, x, norm, tokens, state, **ends):
        projected = decoding.linear(x, self.projections(), norm)
        q, k, v, *gate = (decoding.heads(y, self.head_dim, self.compute_dtype) for y in projected)
        state = {name: cast(array, self.compute_dtype) for name, array in state.items()}
        o, key, value = local_attention_step(
            **{"q": q, "k": k, "v": v, **state, "position": tokens.position[:, 0]},
            **decoding.head_norms(self.q_norm, self.k_norm),
            frequencies=frequencies(self.rotary_dim, self.rope_max_wavelength, self.state_dtype),
            sliding_window=self.sliding_window,
            query_scale=self.query_scale,
            logit_scaling=self.logit_scaling,
            output_gate=gate[0] if gate else None,
            token_kind=decoding.token_kinds(tokens),
        )
        x = decoding.add_linear(x, ops.reshape(o, (o.shape[0], -1)), [self.o_proj], **ends)
        return x, {"key": key, "value": value}


def _integer_or_none(name, size):
    """Returns a size as an integer of Python, which is part of the configuration."""
    if size is None:
        return None
    check_positive_integer(name, size)
    return int(size)


def _rotary_dim(factor, head_dim):
    """Returns the number of rotated channels of a head; checks `partial_rotary_factor`."""
    if not (is_finite_number(factor) and 0 <= factor <= 1):
        raise ValueError(f"`partial_rotary_factor` must be between 0 and 1; got {factor!r}.")
    rotary_dim = int(factor * head_dim)
    if rotary_dim % 2:
        raise ValueError(
            "`head_dim` times `partial_rotary_factor`, the number of rotated channels, must be "
            f"even; got `head_dim` {head_dim} and `partial_rotary_factor` {factor!r}."
        )
    return rotary_dim


def _check_logit_scaling(number):
    if number is not None and not (is_finite_number(number) and number >= 2):
        raise ValueError(
            "`logit_scaling` must be a finite number a of at least 2, for the factor "
            f"ln(t + a) / ln(floor(a)) at position t, or None; got {number!r}."
        )
