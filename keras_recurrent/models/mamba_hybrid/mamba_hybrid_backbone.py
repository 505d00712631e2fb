"""Network of Nemotron-H, Granite 4.0 H, Falcon-H1 and Mamba-2, and its residual block."""

import math

import keras

from keras_recurrent.checks.arguments import (
    check_booleans,
    check_divides,
    check_factors,
    check_positive_integer,
)
from keras_recurrent.layers import Mamba2, SquaredReLUMLP, StreamingLayer, SwiGLU, decoding
from keras_recurrent.models.recurrent_backbone import (
    RecurrentBackbone,
    check_network_sizes,
    expand_block_types,
)
from keras_recurrent.models.residual_block import ResidualBlock

MAMBA, ATTENTION, PARALLEL, MLP = "mamba", "attention", "mamba_and_attention", "mlp"
BLOCK_TYPES = MAMBA, ATTENTION, PARALLEL, MLP
SWIGLU, SQUARED_RELU = "swiglu", "squared_relu"


@keras.saving.register_keras_serializable(package="keras_recurrent")
class ParallelMixers(StreamingLayer):
    """Two layers that mix tokens in parallel: `r_1 mamba(x) + r_2 attention(x)`.

    The token-mixing layer of Falcon-H1 (Falcon LLM Team 2025, arXiv:2507.22448), with Mamba-2 and
    attention.

    Args:
        mamba: any `StreamingLayer` whose output has the shape of its input.
        attention: another such layer.
        mamba_scale: number r_1. None: 1.
        attention_scale: number r_2. None: 1.

    Returns:
        `[B, T, D]` in the compute dtype. With `return_state` also the state: `{"attention": its
        state, "mamba": its state, "segment": [B] int32}`, with `"position"` if a layer has
        positions.
    """

    def __init__(self, mamba, attention, *, mamba_scale=None, attention_scale=None, **kwargs):
        super().__init__(**kwargs)
        self.mamba = mamba
        self.attention = attention
        self.mamba_scale = mamba_scale
        self.attention_scale = attention_scale

    def build(self, input_shape):
        super().build(input_shape)
        for layer in self.streaming_sublayers().values():
            if not layer.built:
                layer.build(input_shape)

    def streaming_sublayers(self):
        return {"attention": self.attention, "mamba": self.mamba}

    def _scales(self):
        return {"attention": self.attention_scale, "mamba": self.mamba_scale}

    def stream(self, inputs, tokens, state):
        outputs, after = [], {}
        for name, scale in self._scales().items():
            layer = self.streaming_sublayers()[name]
            further = {"tokens": tokens, "initial_state": state.get(name), "return_state": True}
            y, after[name] = self.inner(layer, inputs, **further)
            outputs.append(y if scale is None else y * scale)
        return outputs[0] + outputs[1], after

    def unfused_reason(self):
        layers = self.streaming_sublayers().values()
        return decoding.first_reason(
            decoding.class_reason(self, ParallelMixers),
            *(layer.unfused_reason() for layer in layers),
        )

    def fused_step(self, x, norm, tokens, state, output_scale=None, next_norm=None):
        total, after = x, {}
        for name, scale in self._scales().items():
            layer = self.streaming_sublayers()[name]
            factors = [factor for factor in (scale, output_scale) if factor is not None]
            ends = {"residual": total.x, "output_scale": math.prod(factors) if factors else None}
            ends |= {"next_norm": next_norm} if name == "mamba" else {}  # after the sum
            total, after[name] = layer.fused_step(x, norm, tokens, state[name], **ends)
        return total, after

    @classmethod
    def from_config(cls, config):
        names = "mamba", "attention"
        layers = {name: keras.layers.deserialize(config[name]) for name in names}
        return super().from_config({**config, **layers})


@keras.saving.register_keras_serializable(package="keras_recurrent")
class MambaHybridResidualBlock(ResidualBlock):
    """Residual block that mixes tokens, channels, or tokens and then channels.

    ```
    x = x + r temporal_block(RMSNorm(x))            unless `temporal_block` is None
    x = x + s MLP(RMSNorm(x))                       unless `intermediate_dim` is None
    ```

    A block of Nemotron-H has only one of the two lines (NVIDIA 2025, arXiv:2504.03624), a block of
    Mamba-2 only the first.

    Args:
        residual_scale: number r. None: 1.
        mlp: `"swiglu"` or `"squared_relu"`, the layer that mixes channels.
        mlp_gate_scale: number, the `gate_scale` of the SwiGLU. None: 1.
        mlp_scale: number s. None: 1.
    """

    def __init__(
        self,
        temporal_block,
        intermediate_dim,
        *,
        mlp="swiglu",
        mlp_gate_scale=None,
        mlp_scale=None,
        **kwargs,
    ):
        super().__init__(temporal_block, intermediate_dim, **kwargs)
        self.mlp_type = mlp
        self.mlp_gate_scale = mlp_gate_scale
        self.mlp_scale = mlp_scale

    def make_mlp(self, name):
        options = {"dtype": self.dtype_policy, "name": name}
        if self.mlp_type == SQUARED_RELU:
            return SquaredReLUMLP(self.intermediate_dim, **options)
        return SwiGLU(self.intermediate_dim, gate_scale=self.mlp_gate_scale, **options)

    def parts(self):
        *mixers, (norm, layer, scale) = super().parts()
        scale = scale if layer is self.temporal_block else self.mlp_scale
        return [*mixers, (norm, layer, scale)]

    def get_config(self):
        return {**super().get_config(), "mlp": self.mlp_type}


@keras.saving.register_keras_serializable(package="keras_recurrent")
class MambaHybridBackbone(RecurrentBackbone):
    """Network of Nemotron-H, Granite 4.0 H, Falcon-H1 and Mamba-2, from tokens to hidden states.

    Residual blocks (see `MambaHybridResidualBlock`) between an embedding and a final RMSNorm. The
    models have these types of blocks:

    | model | `block_types` | `use_mlp` | `mlp` |
    | --- | --- | --- | --- |
    | Nemotron-H | `"mamba"`, `"attention"`, `"mlp"` | False | `"squared_relu"` |
    | Granite 4.0 H | `"mamba"`, `"attention"` | True | `"swiglu"` |
    | Falcon-H1 | `"mamba_and_attention"` | True | `"swiglu"` |
    | Mamba-2 | `"mamba"` | False | |

    NVIDIA 2025 (arXiv:2504.03624), IBM 2025 (huggingface.co/ibm-granite), Falcon LLM Team 2025
    (arXiv:2507.22448), and Dao and Gu 2024 (arXiv:2405.21060). Attention is grouped-query attention
    to all earlier tokens, without positions except in Falcon-H1. Arguments of block types outside
    the pattern are ignored.

    Args:
        block_types: a pattern of `"mamba"`, `"attention"`, `"mamba_and_attention"`, which adds the
            outputs of both on the same inputs, and `"mlp"`, which mixes channels only, repeated up
            to `num_layers`; or one of these names, for all blocks.
        use_mlp: boolean, whether blocks that mix tokens mix channels afterwards.
        mlp: `"swiglu"`, or `"squared_relu"`, as in `keras_recurrent.layers.SquaredReLUMLP`.
        num_mamba_heads: integer, the number of heads of a Mamba-2 layer; see
            `keras_recurrent.layers.Mamba2` for this argument and the next ones.
        mamba_head_dim: integer, the size of a Mamba-2 head.
        mamba_state_dim: integer, the size of B and C in a group of Mamba-2.
        num_mamba_groups: integer, the number of groups of Mamba-2.
        mamba_conv_size: integer, the number of taps of Mamba-2's convolutions.
        use_mamba_conv_bias: boolean, whether Mamba-2's convolutions have biases.
        mamba_norm_position: `"after_gate"`, `"before_gate"` or None.
        mamba_projection_scales: five numbers, factors of z, x, B, C and dt. None: 1.
        query_scale: number, the factor of the logits of attention. None: 1 / sqrt(head_dim).
        rope_max_wavelength: number, the base of the wavelengths of rotary positions in attention.
            None: no positions.
        mamba_scale: number, the factor of the outputs of Mamba-2. None: 1.
        attention_scale: number, the factor of the outputs of attention. None: 1.
        mlp_scale: number, the factor of the outputs of layers that mix channels. None: 1.
        mlp_gate_scale: number, the factor inside the silu of a SwiGLU. None: 1.

    Raises:
        ValueError: `mlp` is unknown, or a size that a block type in the pattern needs is missing or
            does not divide another one.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.models import MambaHybridBackbone
    >>> backbone = MambaHybridBackbone.from_preset("nemotron_h_tiny")
    >>> token_ids = np.array([[1, 100, 101, 102, 0]])
    >>> tuple(backbone({"token_ids": token_ids, "padding_mask": token_ids > 0}).shape)
    (1, 5, 128)
    """

    free_arguments = ("max_position_embeddings",)

    def __init__(
        self,
        vocabulary_size,
        num_layers,
        hidden_dim,
        intermediate_dim=None,
        *,
        block_types=(MAMBA, MLP),
        use_mlp=False,
        mlp=SQUARED_RELU,
        num_mamba_heads=None,
        mamba_head_dim=64,
        mamba_state_dim=128,
        num_mamba_groups=1,
        mamba_conv_size=4,
        use_mamba_conv_bias=True,
        mamba_norm_position="after_gate",
        mamba_projection_scales=None,
        num_query_heads=None,
        num_key_value_heads=1,
        head_dim=128,
        query_scale=None,
        rope_max_wavelength=None,
        max_position_embeddings=None,
        embedding_scale=None,
        output_scale=None,
        mamba_scale=None,
        attention_scale=None,
        mlp_scale=None,
        mlp_gate_scale=None,
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-5,
        dtype=None,
        name=None,
        trainable=True,
    ):
        check_positive_integer("num_layers", num_layers)
        check_booleans(use_mlp=use_mlp, use_mamba_conv_bias=use_mamba_conv_bias)
        block_types = expand_block_types(block_types, num_layers, *BLOCK_TYPES)
        if mlp not in (SWIGLU, SQUARED_RELU):
            raise ValueError(f"`mlp` must be {SWIGLU!r} or {SQUARED_RELU!r}; got {mlp!r}.")
        sizes = vocabulary_size, num_layers, hidden_dim, intermediate_dim
        check_network_sizes(*sizes, has_mlp=False)
        check_factors(embedding_scale=embedding_scale, output_scale=output_scale)
        check_factors(mamba_scale=mamba_scale, attention_scale=attention_scale, mlp_scale=mlp_scale)
        self.store_arguments(MambaHybridBackbone, locals())
        self._check_needed_sizes()
        super().__init__(**self.make_arguments(MambaHybridResidualBlock, locals()))

    def _check_needed_sizes(self):
        """Raises an error if a size that a block type in the pattern needs is missing."""
        types = set(self.block_types)
        needed = []
        if types & {MAMBA, PARALLEL}:
            needed += ["num_mamba_heads", "mamba_head_dim", "mamba_state_dim"]
            needed += ["num_mamba_groups", "mamba_conv_size"]
        if types & {ATTENTION, PARALLEL}:
            needed += ["num_query_heads"]
        if self.use_mlp or MLP in types:
            needed += ["intermediate_dim"]
        for argument in needed:
            check_positive_integer(argument, getattr(self, argument))
        if "num_mamba_heads" in needed:
            groups, heads = self.num_mamba_groups, self.num_mamba_heads
            check_divides("num_mamba_groups", groups, "`num_mamba_heads`", heads)

    def make_mixer(self, i, **kwargs):
        block_type = self.block_types[i]
        if block_type == MAMBA:
            return self._make_mamba(i, **kwargs)
        if block_type == ATTENTION:
            return self._make_attention(i, **kwargs)
        if block_type == MLP:
            return None
        return ParallelMixers(
            self._make_mamba(i, **{**kwargs, "name": "mamba"}),
            self._make_attention(i, **{**kwargs, "name": "attention"}),
            **self.stored("mamba_scale", "attention_scale"),
            **kwargs,
        )

    def _make_mamba(self, i, **kwargs):
        shared = 2 * self.num_mamba_groups * self.mamba_state_dim
        self.check_split(
            i,
            x_proj={"num_mamba_heads": self.num_mamba_heads},
            bc_proj={"2 * num_mamba_groups * mamba_state_dim": shared},
        )
        return Mamba2(
            self.num_mamba_heads,
            head_dim=self.mamba_head_dim,
            state_dim=self.mamba_state_dim,
            num_groups=self.num_mamba_groups,
            conv_size=self.mamba_conv_size,
            use_conv_bias=self.use_mamba_conv_bias,
            norm_position=self.mamba_norm_position,
            projection_scales=self.mamba_projection_scales,
            layer_norm_epsilon=self.layer_norm_epsilon,
            **kwargs,
        )

    def _make_attention(self, i, **kwargs):
        positions = {"partial_rotary_factor": 0}
        if self.rope_max_wavelength is not None:
            positions = {"rope_max_wavelength": self.rope_max_wavelength}
        return self.make_attention(
            i,
            head_dim=self.head_dim,
            use_output_bias=False,
            query_scale=self.query_scale,
            **positions,
            **kwargs,
        )

    def block_options(self, i):
        block_type = self.block_types[i]
        scales = {MAMBA: self.mamba_scale, ATTENTION: self.attention_scale}
        has_mlp = self.use_mlp or block_type == MLP
        return {
            "intermediate_dim": self.intermediate_dim if has_mlp else None,
            "residual_scale": scales.get(block_type),  # layers in `ParallelMixers` have their own
            **self.stored("mlp", "mlp_gate_scale", "mlp_scale"),
        }

    @staticmethod
    def weight_layout(data, model, num_devices, num_key_value_heads=1):
        layout = RecurrentBackbone.weight_layout(data, model, num_devices, num_key_value_heads)
        return {**layout, "block.*(/norm/scale|a_log|dt_bias|skip)": (model,)}
