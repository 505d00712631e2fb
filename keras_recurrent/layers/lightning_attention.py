"""Linear attention with one decay per head, the token-mixing layer of TransNormerLLM."""

import keras
from keras import ops

from keras_recurrent.checks.arguments import (
    check_booleans,
    check_divides,
    check_factors,
    check_number,
    check_positive_integer,
    check_positive_integers,
)
from keras_recurrent.checks.shapes import reshape
from keras_recurrent.devices import jax_steps
from keras_recurrent.dispatch import BACKEND
from keras_recurrent.layers import decoding
from keras_recurrent.layers.base import cast
from keras_recurrent.layers.heads import HeadsLayer, frequencies, rotate
from keras_recurrent.layers.lrpe import LRPE
from keras_recurrent.ops import lightning_attention
from keras_recurrent.ops.decoding_steps import lightning_step

if BACKEND == "torch":
    from keras_recurrent.layers.torch_calls import copy_to_device


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LightningAttention(HeadsLayer):
    """Linear attention with a constant decay per head, in linear time with a state of fixed size.

    ```
    q_t, k_t = silu(W_q x_t), silu(W_k x_t);   v_t, u_t = W_v x_t, W_u x_t
    S_t = λ S_{t-1} + k_t v_t^T;   o_t = S_t^T q_t               in each head, not scaled
    y_t = W_o (u_t * SimpleRMSNorm(o_t))                         the norm over all heads, ε = 1e-6
    ```

    Qin et al. 2024 (arXiv:2405.17381) and 2023 (arXiv:2307.14995). MiniMax-01 (MiniMax 2025,
    arXiv:2501.08313) applies a sigmoid to W_u x_t and silu to W_v x_t. Time grows linearly with the
    sequence length. With `use_lrpe`, as in TransNormerLLM's first layer, queries and keys also
    encode their distance (see `keras_recurrent.layers.LRPE`), and their heads are twice as wide;
    positions count the real tokens of a document, from 0.

    HypeNet (Chen et al. 2026, arXiv:2601.22156) and MiniCPM-SALA (MiniCPM Team 2026,
    arXiv:2602.11761) have norms of queries and keys, rotary positions (Su et al. 2021,
    arXiv:2104.09864), no activations, a weight w in the norm over all heads, and a sigmoid gate.
    Consecutive heads of queries may share keys and values.

    ```
    q_t = c rotate(RMSNorm(W_q x_t), t);   k_t = rotate(RMSNorm(W_k x_t), t)         in each head
    y_t = W_o (σ(W_u x_t) * w * RMSNorm(o_t))
    ```

    λ is a constant of head h = 1..H and, except with "alibi", of layer l = 0..L-1: heads of higher
    layers then have a longer memory.

    ```
    "checkpoints"   λ = exp(-s_h (1 - l / (L - 1) + 1e-5))      exp(-s_h (1 + 1e-5)) where L is 1
    "alibi"         λ = exp(-s_h)
    "paper"         λ = exp(-(8 h / H) (1 - l / L))
    ```

    "paper" is the schedule printed in the papers, provided to reproduce them. It forgets quickly:
    the memory of a head decays to 1 / e in 1 / ((8 h / H) (1 - l / L)) tokens. These are H / 8 in
    the first head of the first layer, H / 4 in the middle layer, H L / 8 in the last layer, and
    less than one token in half of all heads.

    "checkpoints" is the schedule of the published TransNormerLLM, with the slopes s_h of ALiBi
    (Press et al. 2021, arXiv:2108.12409); "alibi" is that of HypeNet and MiniCPM-SALA. The last
    head has the longest memory, 256 tokens with "alibi" and in the first layer with "checkpoints".
    If H is a power of two, s_h = 2^(-8 h / H). Otherwise, let n be the largest power of two below
    H: the first n slopes are those of n heads, and the others are every second slope of 2 n heads,
    starting with the first.

    Args:
        num_heads: integer, H.
        head_dim: integer, the size of a head; 128 in the published models.
        num_key_value_heads: integer, heads of keys and values, which must divide `num_heads`. None:
            `num_heads`.
        decay_schedule: `"checkpoints"`, `"alibi"`, or `"paper"`, which forgets within a few tokens;
            see above.
        layer_index: integer, l, the index of the layer in its network, from 0.
        num_layers: integer, L, the number of such layers.
        use_lrpe: boolean, whether queries and keys get positions by LRPE.
        rope_max_wavelength: number, the base of rotary positions over the whole head, as in
            `keras_recurrent.layers.LocalAttention`. None: no rotary positions.
        query_scale: number, c, which multiplies the queries. None: 1.
        use_qk_norm: boolean, whether an RMSNorm is applied to each head of queries and keys, before
            positions.
        use_norm_weight: boolean, whether the norm over all heads has a weight.
        layer_norm_epsilon: float, ε of the norms.
        gate_activation: activation of the gate u; `"linear"`, in MiniMax-01 `"sigmoid"`.
        value_activation: activation of the values v; `"linear"`, in MiniMax-01 `"silu"`.
        query_key_activation: activation of the queries q and keys k; `"silu"` in both.
        kernel_initializer: initializer of the five kernels.

    Returns:
        y as `[B, T, D]` in the compute dtype; the memory and its sums are float32 (float64 under a
        float64 policy). With `return_state` also the state: `{"memory": [B, num_heads, head_dim,
        head_dim] float32, "segment": [B] int32}`. With `use_lrpe`, `memory`
        is `[B, num_heads, 2 * head_dim, head_dim]`, and the state also has
        `"position": [B] int32`, the position of the next token.

    Sublayers: `q_proj`, `k_proj`, `v_proj`, `u_proj` and `o_proj`, all `Dense` without bias, with
    kernels `[D, heads * head_dim]`, and `[num_heads * head_dim, D]` in `o_proj`; `norm`, with
    `use_qk_norm` `q_norm` and `k_norm`, with weights `[head_dim]`, and with `use_lrpe` the `lrpe`
    that queries and keys share.

    Raises:
        ValueError: `num_key_value_heads` does not divide `num_heads`, `decay_schedule` is unknown,
            `layer_index` is not below `num_layers`, both kinds of positions are given, or
            `head_dim` is odd with rotary positions.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import LightningAttention

    y, state = LightningAttention(2, head_dim=4, return_state=True)(np.ones((2, 5, 8), "float32"))
    assert y.shape == (2, 5, 8) and state["memory"].shape == (2, 2, 4, 4)
    ```
    """

    def __init__(
        self,
        num_heads,
        *,
        head_dim=128,
        decay_schedule="checkpoints",
        layer_index=0,
        num_layers=1,
        use_lrpe=False,
        kernel_initializer="lecun_normal",
        return_state=False,
        gate_activation="linear",
        value_activation="linear",
        query_key_activation="silu",
        num_key_value_heads=None,
        rope_max_wavelength=None,
        query_scale=None,
        use_qk_norm=False,
        use_norm_weight=False,
        layer_norm_epsilon=1e-6,
        **kwargs,
    ):
        super().__init__(return_state=return_state, **kwargs)
        check_positive_integers(num_heads=num_heads, head_dim=head_dim, num_layers=num_layers)
        if num_key_value_heads is not None:
            check_positive_integer("num_key_value_heads", num_key_value_heads)
            check_divides("num_key_value_heads", num_key_value_heads, "`num_heads`", num_heads)
        check_booleans(use_lrpe=use_lrpe, use_qk_norm=use_qk_norm, use_norm_weight=use_norm_weight)
        _check_rope(rope_max_wavelength, head_dim, use_lrpe)
        check_number("layer_norm_epsilon", layer_norm_epsilon)
        check_factors(query_scale=query_scale)
        self.log_decay = log_decay(decay_schedule, num_heads, layer_index, num_layers)
        self.store_arguments(LightningAttention, locals())
        inner, shared = num_heads * head_dim, (num_key_value_heads or num_heads) * head_dim
        self.q_proj = self.make_dense(inner, "q_proj")
        self.k_proj = self.make_dense(shared, "k_proj")
        self.v_proj = self.make_dense(shared, "v_proj")
        self.u_proj = self.make_dense(inner, "u_proj")
        self.norm = self.make_norm("norm", use_norm_weight)
        self.q_norm = self.make_norm("q_norm") if use_qk_norm else None
        self.k_norm = self.make_norm("k_norm") if use_qk_norm else None
        self.lrpe = self.make_sublayer(LRPE, name="lrpe") if use_lrpe else None

    def build(self, input_shape):
        super().build(input_shape)
        self.norm.build((*input_shape[:2], self.num_heads * self.head_dim))
        if self.lrpe:
            self.lrpe.build((*input_shape[:2], self.num_heads, self.head_dim))

    @property
    def uses_position(self):
        return self.use_lrpe or self.rope_max_wavelength is not None

    def stream(self, inputs, tokens, state):
        q = self._positioned(self.q_proj, self.q_norm, inputs, tokens.position, self.query_scale)
        k = self._positioned(self.k_proj, self.k_norm, inputs, tokens.position)
        v = self._heads(self.value_activation(self.inner(self.v_proj, inputs)), inputs)
        if state and decoding.can_fuse(inputs) and keras.distribution.distribution() is None:
            # It overwrites the memory; `lightning_attention` would write another one.
            arguments = {"memory": state["memory"], "log_decay": self._decays(v)}
            arguments |= {"token_kind": decoding.token_kinds(tokens)}
            o, _, memory = lightning_step(q=q[:, 0], k=k[:, 0], v=v[:, 0], **arguments)
            return o[:, None], {"memory": memory}
        groups = self.num_heads // (self.num_key_value_heads or self.num_heads)
        if groups > 1:
            k, v = ops.repeat(k, groups, axis=2), ops.repeat(v, groups, axis=2)
        o, memory = lightning_attention(
            *(q, k, v),
            self._decays(v),
            initial_state=state.get("memory"),
            token_kind=tokens.kind,
        )
        return o, {"memory": memory}

    def _decays(self, v):
        """Returns log λ of each head as a tensor, in the state's dtype."""
        if BACKEND == "torch" and v.shape[1] > 1:  # a step may be captured, without such copies
            return copy_to_device(self.log_decay, self.state_dtype, v.device)
        return ops.convert_to_tensor(self.log_decay, self.state_dtype)

    def _positioned(self, projection, norm, inputs, position, scale=None):
        """Returns queries or keys by heads, with norm and positions."""
        x = self._heads(self.query_key_activation(self.inner(projection, inputs)), inputs)
        if norm:
            x = self.inner(norm, x)
        if self.lrpe:
            x = self.lrpe(x, position)
        elif self.rope_max_wavelength is not None:
            x = ops.cast(x, self.state_dtype)
            x = rotate(x, position, self.rope_max_wavelength, self.head_dim)
        if scale is not None:
            x = x * scale  # `ops.multiply` waits for the GPU, to copy the number
        return cast(x, self.compute_dtype)

    def finish(self, output, inputs):
        o = reshape(output, (*ops.shape(output)[:2], self.num_heads * self.head_dim))
        gate = self.gate_activation(self.inner(self.u_proj, inputs))
        return self.inner(self.o_proj, ops.multiply(gate, self.inner(self.norm, o)))

    def _heads(self, x, inputs):
        # Keras on torch multiplies float64 as float32.
        return cast(self.split_heads(x, inputs), self.compute_dtype)

    def unfused_reason(self):
        if self.use_lrpe:
            return f"`{self.name}` has the positions `lrpe`"
        activations = self.query_key_activation, self.value_activation, self.gate_activation
        linear = keras.activations.linear
        if activations != (linear, linear, keras.activations.sigmoid):
            return f"`{self.name}` must have linear queries, keys and values, and a sigmoid gate"
        return decoding.first_reason(
            decoding.class_reason(self, LightningAttention),
            super().unfused_reason(),
            decoding.norm_reason(self.norm),
        )

    def projections(self):
        return [self.q_proj, self.k_proj, self.v_proj, self.u_proj]

    def fused_step(self, x, norm, tokens, state, **ends):
        qkvu = decoding.linear(x, self.projections(), norm)
        q, k, v, gate = (decoding.heads(y, self.head_dim, self.compute_dtype) for y in qkvu)
        positions = {}
        if self.rope_max_wavelength is not None:
            positions = {
                "position": tokens.position[:, 0],
                "frequencies": frequencies(
                    self.head_dim, self.rope_max_wavelength, self.state_dtype
                ),
            }
        o, squares, memory = lightning_step(
            **{"q": q, "k": k, "v": v, **state, **positions},
            **decoding.head_norms(self.q_norm, self.k_norm),
            log_decay=jax_steps.local_part(
                ops.convert_to_tensor(self.log_decay, self.state_dtype), q.shape[1]
            ),
            query_scale=self.query_scale,
            norm_scale=jax_steps.local_part(self.norm.factor(), q.shape[1] * self.head_dim),
            output_gate=gate,
            token_kind=decoding.token_kinds(tokens),
        )
        o = ops.reshape(o, (o.shape[0], -1))
        x = decoding.add_linear(x, o, [self.o_proj], self.norm, squares=squares, **ends)
        return x, {"memory": memory}

    def own_state_spec(self, batch_size=None):
        keys = 2 * self.head_dim if self.use_lrpe else self.head_dim
        return {"memory": self.array_spec(batch_size, self.num_heads, keys, self.head_dim)}


def log_decay(schedule, num_heads, layer_index, num_layers):
    """Returns log λ of each head, `num_heads` numbers below 0; see `LightningAttention`."""
    if not isinstance(layer_index, int) or not 0 <= layer_index < num_layers:
        raise ValueError(
            f"`layer_index` must be an integer from 0 to `num_layers` - 1, {num_layers - 1}; got "
            f"{layer_index!r}."
        )
    if schedule == "paper":
        slopes = [8 * h / num_heads for h in range(1, num_heads + 1)]
        factor = 1 - layer_index / num_layers
    elif schedule in ("checkpoints", "alibi"):
        slopes = alibi_slopes(num_heads)
        scaled = schedule == "checkpoints"
        factor = 1 - layer_index / max(num_layers - 1, 1) + 1e-5 if scaled else 1
    else:
        known = '"checkpoints", "alibi" or "paper"'
        raise ValueError(f"`decay_schedule` must be {known}; got {schedule!r}.")
    return tuple(-slope * factor for slope in slopes)


def alibi_slopes(num_heads):
    """Returns the slopes of ALiBi (Press et al. 2021, arXiv:2108.12409), one per head."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    others = alibi_slopes(2 * power)[::2] if power < num_heads else []
    return slopes + others[: num_heads - power]


def _check_rope(max_wavelength, head_dim, use_lrpe):
    if max_wavelength is None:
        return
    check_number("rope_max_wavelength", max_wavelength, above=0)
    if use_lrpe or head_dim % 2:
        raise ValueError(
            "`rope_max_wavelength` needs an even `head_dim`, and `use_lrpe=False`, which has other "
            f"positions; got {head_dim} and {use_lrpe}. Leave `rope_max_wavelength` out, or change "
            "these arguments."
        )
