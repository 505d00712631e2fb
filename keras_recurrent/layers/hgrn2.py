"""Token-mixing layer of HGRN2: a gated linear recurrence whose state is a matrix."""

from typing import Any

import keras
from keras import ops

from keras_recurrent.backends.constants import MAX_STEP_KEYS, STATE_WRITE_INTERVAL
from keras_recurrent.checks.arguments import check_divides, check_positive_integer
from keras_recurrent.checks.shapes import reshape
from keras_recurrent.devices import jax_steps
from keras_recurrent.layers import decoding
from keras_recurrent.layers.causal_conv1d import CausalConv1D
from keras_recurrent.layers.lower_bounds import ForgetGateLayer
from keras_recurrent.layers.rms_norm import RMSNorm
from keras_recurrent.ops import gated_linear_attention
from keras_recurrent.ops.decoding_steps import hgrn2_delayed_step, hgrn2_step

EXPAND_RATIO = 128  # Qin et al. 2024, arXiv:2404.07904
NORM_EPSILON = 1e-5


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2(ForgetGateLayer):
    """Gated linear recurrence of HGRN2: an HGRN whose state is expanded to a matrix per head.

    ```
    q_t = silu(W_q x_t)                          query, the paper's output gate
    f_t = β + (1 - β) σ(W_f x_t + b_f)           forget gate, β the layer's lower bound
    v_t = W_i x_t                                input
    S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T    in each head, K x K
    o_t = S_t^T q_t K^(-1/2)
    y_t = W_o RMSNorm(o_t)                       the norm over all heads, ε = 1e-5
    ```

    Qin et al. 2024 (arXiv:2404.07904, section 3). The layer is linear attention whose keys are
    1 - f: they have no separate weights. The defaults are those of the published checkpoints: silu
    for the output gate and no activation for the input. The paper prints a sigmoid and silu.

    Args:
        expand_ratio: integer, K, the size of a head and the expansion of the state compared with
            that of an `HGRN`; must divide the width. None: the largest divisor of the width up to
            the paper's 128. After `build`, the attribute of this name is the resolved number.
        gate_activation: activation of the output gate; `"silu"`, in the paper `"sigmoid"`.
        input_activation: activation of the input; `"linear"`, in the paper `"silu"`.
        conv_size: integer, the number of taps of short causal convolutions without bias, one after
            each of W_q, W_f and W_i, before the activations above. None: no convolutions.
        f_bias_initializer: initializer of b_f, a bias of the forget gates. None: b_f is 0, and
            the influence of a token initially halves with each later token. As the only recurrent
            layer, the layer then learns no long memory: pass `DecayLogit(0.1, 0.9, power=64)`,
            with which channels initially keep 0.1 to 0.9 of this influence over 64 tokens, similar
            to Tallec & Ollivier 2018 (arXiv:1804.11188, section 2), and a `conv_size`, such as 8.
        kernel_initializer: initializer of all kernels.

    Call arguments:
        lower_bound: `[2, D]`, log β and log(1 - β), one entry of the output of
            `keras_recurrent.layers.LowerBounds`; None: β is 0. Not supported with `go_backwards`:
            for both directions with a bound, use `keras_recurrent.layers.BidirectionalHGRN2`.

    Returns:
        y as `[B, T, D]` in the compute dtype. With `return_state` also the state:
        `{"memory": [B, D / K, K, K] float32, "segment": [B] int32}`, and with `conv_size` the
        states of three `CausalConv1D`, `"q_conv1d"`, `"f_conv1d"` and `"i_conv1d"`, each
        `{"inputs": [B, conv_size - 1, D] float32}`.

    Sublayers: `q_proj`, `f_proj`, `i_proj`, `o_proj`, all `Dense` without bias, `norm`, and with
    `conv_size` the convolutions. The inputs of the linear layers are all tokens of the batch,
    `[B * T, D]`; hooks and activity regularizers get this shape. b_f is the weight `f_bias`. The
    bias, the forget gates and the memory are float32 even under a 16-bit policy.

    Raises:
        ValueError: `expand_ratio` does not divide D, or is None and no number from 8 to 128 divides
            a D above 128; `conv_size` is not an integer of at least 1; or a lower bound is passed
            with `go_backwards`.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import HGRN2

    y, state = HGRN2(expand_ratio=4, return_state=True)(np.ones((2, 5, 8), "float32"))
    assert y.shape == (2, 5, 8) and state["memory"].shape == (2, 2, 4, 4)
    ```
    """

    expand_ratio: Any

    def __init__(
        self,
        *,
        expand_ratio=None,
        gate_activation="silu",
        input_activation="linear",
        conv_size=None,
        f_bias_initializer=None,
        kernel_initializer="lecun_normal",
        return_state=False,
        **kwargs,
    ):
        super().__init__(f_bias_initializer=f_bias_initializer, return_state=return_state, **kwargs)
        check_positive_integer("expand_ratio", expand_ratio, or_none=True)
        check_positive_integer("conv_size", conv_size, or_none=True)
        self.store_arguments(HGRN2, locals())
        self.convolutions = {}

    def build(self, input_shape):
        super().build(input_shape)
        if self.expand_ratio is None:
            self.expand_ratio = default_expand_ratio(self.width)
        check_divides("expand_ratio", self.expand_ratio, "the width of the inputs", self.width)
        self.q_proj = self.make_dense(self.width, "q_proj", input_shape=input_shape)
        self.f_proj = self.make_dense(self.width, "f_proj", input_shape=input_shape)
        self.i_proj = self.make_dense(self.width, "i_proj", input_shape=input_shape)
        self.o_proj = self.make_dense(self.width, "o_proj", input_shape=input_shape)
        self.norm = self.make_sublayer(
            RMSNorm, epsilon=NORM_EPSILON, zero_centered=False, name="norm"
        )
        self.norm.build(input_shape)
        if self.conv_size is not None:
            self.q_conv1d = self._convolution("q_conv1d", self.gate_activation)
            self.f_conv1d = self._convolution("f_conv1d")
            self.i_conv1d = self._convolution("i_conv1d", self.input_activation)

    def _convolution(self, name, activation=None):
        convolution = self.make_sublayer(
            CausalConv1D,
            self.conv_size,
            use_bias=False,
            activation="silu" if activation is keras.activations.silu else None,
            kernel_initializer=self.kernel_initializer,
            name=name,
        )
        convolution.build((None, None, self.width))
        self.convolutions[name] = convolution
        return convolution

    def check_arguments(self, inputs, lower_bound=None, **kwargs):
        super().check_arguments(inputs, lower_bound=lower_bound, **kwargs)
        if self.go_backwards and lower_bound is not None:
            raise ValueError(
                "`HGRN2` with `go_backwards=True` does not support `lower_bound`. Use "
                "`keras_recurrent.layers.BidirectionalHGRN2`, whose directions share the gates and "
                "their bound, or call `keras.layers.Bidirectional(HGRN2(...))` without a bound."
            )

    def streaming_sublayers(self):
        return self.convolutions

    def stream(self, inputs, tokens, state, lower_bound=None):
        after = {}
        projected = {
            "q": self.project(self.q_proj, inputs),
            "f": self.project(self.f_proj, inputs),
            "i": self.project(self.i_proj, inputs),
        }
        for name, convolution in self.convolutions.items():
            further = {"tokens": tokens, "initial_state": state.get(name), "return_state": True}
            projected[name[0]], after[name] = self.inner(convolution, projected[name[0]], **further)
        q, v, log_f = self.gates(**projected, lower_bound=lower_bound)
        o, after["memory"] = gated_linear_attention(
            *(q, None, v, log_f),
            initial_state=state.get("memory"),
            token_kind=tokens.kind,
        )
        return o, after

    def finish(self, output, inputs):
        return self.output_of(output)

    def gates(self, q, f, i, lower_bound):
        """Returns queries, values and log forget gates by heads, from the three projections."""
        q = self._activated(q, self.gate_activation) * self.expand_ratio**-0.5
        log_f = self.log_forget_gate(f, lower_bound)
        v = self._activated(i, self.input_activation)
        batch, length = ops.shape(v)[:2]
        heads = (batch, length, self.width // self.expand_ratio, self.expand_ratio)
        return tuple(reshape(x, heads) for x in (q, v, log_f))

    def _activated(self, x, activation):
        """Applies an activation, unless a convolution has applied it (silu)."""
        done = self.conv_size is not None and activation is keras.activations.silu
        return x if done else activation(x)

    def output_of(self, o):
        """Returns the layer's output from the outputs of its heads."""
        o = reshape(o, (*ops.shape(o)[:2], self.width))
        return self.project(self.o_proj, self.inner(self.norm, o))

    def unfused_reason(self):
        if self.conv_size is not None:
            return f"`{self.name}` has convolutions"
        if self.f_bias is not None:
            return f"`{self.name}` has a bias of the forget gates"
        activations = self.gate_activation, self.input_activation
        if activations != (keras.activations.silu, keras.activations.linear):
            return f"`{self.name}` must have a silu output gate and a linear input activation"
        return decoding.first_reason(
            decoding.class_reason(self, HGRN2),
            decoding.denses_reason([self.q_proj, self.f_proj, self.i_proj], [self.o_proj]),
            decoding.norm_reason(self.norm),
        )

    def fused_step(self, x, norm, tokens, state, lower_bound=None, **ends):
        q, f, v = decoding.linear(x, [self.q_proj, self.f_proj, self.i_proj], norm)
        if lower_bound is not None:
            lower_bound = jax_steps.local_part(ops.cast(lower_bound, self.state_dtype), f.shape[-1])
        kinds = decoding.token_kinds(tokens)
        weight = jax_steps.local_part(self.norm.factor(), f.shape[-1])
        step, names = hgrn2_step, ["memory"]
        if "recent" in state:
            step, names = hgrn2_delayed_step, ["count", "memory", "recent"]
        further = {**state, "lower_bound": lower_bound, "norm_scale": weight, "token_kind": kinds}
        o, squares, *after = step(q=q, f=f, v=v, **further)
        after = dict(zip(names, after, strict=True))
        x = decoding.add_linear(x, o, [self.o_proj], self.norm, squares=squares, **ends)
        return x, after

    def add_recent_tokens(self, state):
        if self.expand_ratio > MAX_STEP_KEYS or self.state_dtype != "float32":
            return state  # the portable step would recompute the memory from the recent tokens
        batch = state["memory"].shape[0]
        recent = batch, STATE_WRITE_INTERVAL - 1, 3 * self.width
        return {
            "count": ops.zeros(batch, "int32"),
            "memory": state["memory"],
            "recent": ops.zeros(recent, "float32"),
        }

    def own_state_spec(self, batch_size=None):
        convolutions = super().own_state_spec(batch_size)
        heads, size = self.width // self.expand_ratio, self.expand_ratio
        return {"memory": self.array_spec(batch_size, heads, size, size), **convolutions}


def default_expand_ratio(width):
    """Returns the default head size: the largest divisor of `width` up to 128.

    Saved models depend on it.

    Raises:
        ValueError: the head size would be below 8, and smaller than `width`.
    """
    ratio = max(n for n in range(1, EXPAND_RATIO + 1) if width % n == 0)
    if ratio < 8 and width > ratio:
        below = width // 64 * 64
        raise ValueError(
            "`expand_ratio`, the size of a head, must divide the width of the inputs. The largest "
            f"divisor of {width} up to {EXPAND_RATIO} is {ratio}, which is too small. Choose "
            f"another width, such as {below} or {below + 64}, or pass an `expand_ratio`."
        )
    return ratio
