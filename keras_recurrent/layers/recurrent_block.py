"""Recurrent block of Griffin and Hawk."""

import keras
from keras import ops

from keras_recurrent.checks.arguments import check_boolean, check_num_blocks, check_positive_integer
from keras_recurrent.layers import decoding
from keras_recurrent.layers.causal_conv1d import CausalConv1D
from keras_recurrent.layers.cg_lru import CGLRU, check_complex_channels
from keras_recurrent.layers.gru_arguments import ALTERNATIVES
from keras_recurrent.layers.initializers import get_decay_initializer
from keras_recurrent.layers.rg_lru import RGLRU
from keras_recurrent.layers.streaming import StreamingLayer
from keras_recurrent.ops.decoding_steps import rg_lru_step
from keras_recurrent.ops.gated_linear_unit import gated_linear_unit

RECURRENCES = {"rg_lru": RGLRU, "cg_lru": CGLRU}


@keras.saving.register_keras_serializable(package="keras_recurrent")
class RecurrentBlock(StreamingLayer):
    """Recurrent block of Griffin and Hawk, the token-mixing layer in place of attention.

    ```
    y_t = W_out (RG-LRU(conv1d(W_x x_t + b_x)) * gelu(W_y x_t + b_y)) + b_out
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.3), with the tanh-approximated gelu. Time and
    memory grow linearly with the sequence length, and the state has a fixed size.

    Args:
        lru_width: integer, the inner width, of the convolution and the recurrence; about 4/3 of
            the inputs' width in the paper.
        kernel_size: integer, the number of taps of the convolution.
        num_blocks: integer, the number of blocks of the RG-LRU's gates; must divide `lru_width`.
            None: 16 if that divides it, else fewer; see `keras_recurrent.layers.RGLRU`.
        a_initializer: see `keras_recurrent.layers.RGLRU`.
        kernel_initializer: initializer of the kernels of the linear layers and the gates.
        bias_initializer: initializer of all biases.
        scale_first_input: boolean; see `keras_recurrent.layers.RGLRU`.
        recurrence: `"rg_lru"`, or `"cg_lru"`, the complex variant of the paper's appendix B
            (`keras_recurrent.layers.CGLRU`), which was not better in the paper; `lru_width` must
            then be even.

    Returns:
        `[B, T, D]` in the compute dtype. With `return_state` also the state:
        `{"conv1d": {"inputs": [B, W - 1, lru_width] float32}, "rg_lru": {"hidden": [B, lru_width]
        float32}, "segment": [B] int32}`, where W is `kernel_size`. With `recurrence="cg_lru"`,
        `"cg_lru"` replaces `"rg_lru"`.

    Sublayers: `linear_x`, `linear_y`, `conv1d`, `rg_lru` or `cg_lru`, `linear_out`. The inputs of
    the linear layers are all tokens of the batch, `[B * T, D]`; hooks and activity regularizers get
    this shape.

    Raises:
        ValueError: `num_blocks` does not divide `lru_width`; `kernel_size` is not an integer of at
            least 1; `a_initializer` or `recurrence` is unknown; or `CGLRU` does not support the
            `lru_width` or `num_blocks`.

    Example: the state continues from chunk to chunk. guides/recipes/long_series.py trains a model
    in this way, by truncated backpropagation through time.

    ```python
    import numpy as np
    from keras_recurrent.layers import RecurrentBlock

    block, state = RecurrentBlock(32, num_blocks=4), None
    for chunk in np.split(np.ones((2, 12, 16), "float32"), 3, axis=1):
        y, state = block(chunk, initial_state=state, return_state=True)
    assert y.shape == (2, 4, 16) and state["rg_lru"]["hidden"].shape == (2, 32)
    ```
    """

    gru_alternatives = ALTERNATIVES | {
        "units": f"{ALTERNATIVES['units']} `lru_width` is the width inside the block, as in "
        "`RecurrentBlock(lru_width=32)`."
    }

    def __init__(
        self,
        lru_width,
        *,
        kernel_size=4,
        num_blocks=None,
        a_initializer="griffin",
        kernel_initializer="lecun_normal",
        bias_initializer="zeros",
        return_state=False,
        scale_first_input=False,
        recurrence="rg_lru",
        **kwargs,
    ):
        super().__init__(return_state=return_state, **kwargs)
        check_positive_integer("lru_width", lru_width)
        if num_blocks is not None:
            check_positive_integer("num_blocks", num_blocks)
            check_num_blocks(num_blocks, lru_width)
        check_boolean("scale_first_input", scale_first_input)
        if recurrence not in RECURRENCES:
            known = " or ".join(f'"{name}"' for name in RECURRENCES)
            raise ValueError(f"`recurrence` must be {known}; got {recurrence!r}.")
        if recurrence == "cg_lru":
            check_complex_channels("`lru_width`", lru_width, num_blocks)
        a_initializer = get_decay_initializer(a_initializer)
        self.store_arguments(RecurrentBlock, locals())
        self.conv1d = self.make_sublayer(
            CausalConv1D, kernel_size, bias_initializer=self.bias_initializer, name="conv1d"
        )
        unit = self.make_sublayer(
            RECURRENCES[recurrence],
            num_blocks=num_blocks,
            a_initializer=self.a_initializer,
            kernel_initializer=self.kernel_initializer,
            bias_initializer=self.bias_initializer,
            scale_first_input=scale_first_input,
            name=recurrence,
        )
        setattr(self, recurrence, unit)  # weight files use this name
        self.linear_x = self.make_dense(lru_width, "linear_x", use_bias=True)
        self.linear_y = self.make_dense(lru_width, "linear_y", use_bias=True)

    def build(self, input_shape):
        super().build(input_shape)
        inner_shape = (*input_shape[:2], self.lru_width)
        self.unit.build(inner_shape)
        self.num_blocks = self.unit.num_blocks
        self.conv1d.build(inner_shape)
        self.linear_x.build(input_shape)
        self.linear_y.build(input_shape)
        self.linear_out = self.make_dense(self.width, "linear_out", True, inner_shape)

    def streaming_sublayers(self):
        return {"conv1d": self.conv1d, self.recurrence: self.unit}

    @property
    def unit(self):
        """The recurrence, an `RGLRU` or a `CGLRU`."""
        return getattr(self, self.recurrence)

    def stream(self, inputs, tokens, state):
        x, after = self.project(self.linear_x, inputs), {}
        for name, layer in self.streaming_sublayers().items():
            further = {"tokens": tokens, "initial_state": state.get(name), "return_state": True}
            x, after[name] = self.inner(layer, x, **further)
        return x, after

    def finish(self, output, inputs):
        gate = self.project(self.linear_y, inputs)
        x = gated_linear_unit(gate, output, activation="gelu")
        return self.project(self.linear_out, x)

    def unfused_reason(self):
        unit = self.unit
        if unit.scale_first_input:
            return f"`{unit.name}` scales a document's first input"
        gates = unit.recurrence_gate, unit.input_gate
        return decoding.first_reason(
            decoding.class_reason(self, RecurrentBlock),
            decoding.class_reason(unit, RGLRU),
            *(decoding.dense_reason(gate, keras.layers.EinsumDense) for gate in gates),
            decoding.class_reason(self.conv1d, CausalConv1D),
            decoding.denses_reason([self.linear_x, self.linear_y], [self.linear_out]),
        )

    def fused_step(self, x, norm, tokens, state, **ends):
        branch, gate = decoding.linear(x, [self.linear_x, self.linear_y], norm)
        unit, conv, dtype = self.rg_lru, self.conv1d, self.compute_dtype
        y, window, hidden = rg_lru_step(
            x=branch,
            gate=gate,
            window=state["conv1d"]["inputs"],
            hidden=state["rg_lru"]["hidden"],
            conv_kernel=conv.kernel,
            conv_bias=conv.bias,
            kernel_a=ops.cast(unit.recurrence_gate.kernel, dtype),
            bias_a=ops.squeeze(ops.cast(unit.recurrence_gate.bias, dtype), 1),
            kernel_x=ops.cast(unit.input_gate.kernel, dtype),
            bias_x=ops.squeeze(ops.cast(unit.input_gate.bias, dtype), 1),
            a_logit=unit.a_logit,
            token_kind=decoding.token_kinds(tokens),
        )
        x = decoding.add_linear(x, y, [self.linear_out], **ends)
        return x, {"conv1d": {"inputs": window}, "rg_lru": {"hidden": hidden}}
