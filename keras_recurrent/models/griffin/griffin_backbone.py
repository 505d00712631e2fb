"""Network of Hawk, Griffin and the MQA Transformer, and its residual block."""

import keras

from keras_recurrent.checks.arguments import check_boolean, check_factors, check_positive_integer
from keras_recurrent.devices.jax_layouts import check_layout
from keras_recurrent.layers import GatedMLP, RecurrentBlock, RMSNorm
from keras_recurrent.models.recurrent_backbone import (
    RecurrentBackbone,
    check_network_sizes,
    expand_block_types,
)
from keras_recurrent.models.residual_block import ResidualBlock

# {block type: arguments that it needs in addition to those of all types}
NEEDS = {
    "recurrent": ("lru_width",),
    "local_attention": ("num_query_heads", "sliding_window"),
    "global_attention": ("num_query_heads",),
}


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinResidualBlock(ResidualBlock):
    """Residual block of Griffin and Hawk, which mixes tokens and then channels.

    ```
    x = x + temporal_block(RMSNorm(x))
    x = x + GatedMLP(RMSNorm(x))
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.1). The norms multiply by 1 + `scale`, as in
    DeepMind's released code.
    """

    def make_norm(self, name):
        return RMSNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype_policy, name=name)

    def make_mlp(self, name):
        return GatedMLP(self.intermediate_dim, dtype=self.dtype_policy, name=name)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinBackbone(RecurrentBackbone):
    """Network of Hawk, Griffin and the MQA Transformer, from tokens to hidden states.

    Residual blocks (see `GriffinResidualBlock`) between an embedding, whose weights also compute
    the logits, and a final RMSNorm. De et al. 2024, arXiv:2402.19427, section 2. `block_types` sets
    the layers that mix tokens: Hawk is all `"recurrent"`, Griffin repeats `("recurrent",
    "recurrent", "local_attention")`, and the Transformer that the paper compares with is all
    `"global_attention"`. Arguments of block types outside the pattern are ignored.

    RecurrentGemma (Botev et al. 2024, arXiv:2404.07839) is Griffin with an `embedding_scale` of
    sqrt(D), a `final_logit_soft_cap` of 30 and a `partial_rotary_factor` of 0.5.

    Args:
        intermediate_dim: integer, the width inside the gated MLP: 3 D in the paper.
        lru_width: integer, the width D_rnn inside the recurrent blocks, near 4 D / 3.
        num_blocks: integer, blocks of the RG-LRU's block-diagonal gates; must divide `lru_width`.
            Defaults to 16.
        block_types: a pattern of `"recurrent"`, `"local_attention"` and `"global_attention"`,
            repeated up to `num_layers`; or one of these names, for all blocks.
        sliding_window: integer, the number of tokens that a token attends to in local attention,
            including itself: 1024 in the paper.
        partial_rotary_factor: float, the fraction of each head with rotary positions. 0: none
            (NoPE).
        final_logit_soft_cap: float, s in logits `s tanh(z / s)`. None: no soft cap.
        a_initializer: initializer of the recurrences' decays; see `keras_recurrent.layers.RGLRU`.
        scale_first_input: boolean. True: recurrences scale a document's first input as in the
            paper's equation 4; see `keras_recurrent.layers.RGLRU`. False in all presets.
        recurrence: `"rg_lru"`, or `"cg_lru"`, its complex variant, with an even `lru_width`; see
            `keras_recurrent.layers.RecurrentBlock`. `"rg_lru"` in all presets.

    Biases are initialized with 0. RecurrentGemma's released code uses smaller values for some
    weights.

    Raises:
        ValueError: arguments of a block type in the pattern are missing, or `num_blocks` does not
            divide `lru_width`.

    Example: a small Griffin.

    >>> import numpy as np
    >>> import keras_recurrent
    >>> backbone = keras_recurrent.models.GriffinBackbone(
    ...     vocabulary_size=259,
    ...     num_layers=3,
    ...     hidden_dim=24,
    ...     intermediate_dim=72,
    ...     lru_width=32,
    ...     block_types=("recurrent", "recurrent", "local_attention"),
    ...     num_query_heads=3,
    ...     head_dim=8,
    ...     sliding_window=16,
    ... )
    >>> token_ids = np.array([[1, 100, 101, 102, 0]])
    >>> tuple(backbone({"token_ids": token_ids, "padding_mask": token_ids > 0}).shape)
    (1, 5, 24)
    """

    def __init__(
        self,
        vocabulary_size,
        num_layers,
        hidden_dim,
        intermediate_dim,
        *,
        lru_width=None,
        num_blocks=16,
        block_types=("recurrent",),
        num_query_heads=None,
        num_key_value_heads=1,
        head_dim=128,
        sliding_window=None,
        rope_max_wavelength=10_000,
        partial_rotary_factor=1.0,
        embedding_scale=None,
        final_logit_soft_cap=None,
        a_initializer="griffin",
        layer_norm_epsilon=1e-6,
        scale_first_input=False,
        recurrence="rg_lru",
        dtype=None,
        name=None,
        trainable=True,
    ):
        check_network_sizes(vocabulary_size, num_layers, hidden_dim, intermediate_dim)
        check_factors(final_logit_soft_cap=final_logit_soft_cap, embedding_scale=embedding_scale)
        check_boolean("scale_first_input", scale_first_input)
        # A string would be a pattern of its letters.
        block_types = (block_types,) if isinstance(block_types, str) else tuple(block_types)
        self.store_arguments(GriffinBackbone, locals())
        _check_block_types(self)
        super().__init__(**self.make_arguments(GriffinResidualBlock, locals()))

    def make_mixer(self, i, **kwargs):
        block_type = self.block_types[i % len(self.block_types)]
        if block_type == "recurrent":
            check_positive_integer("num_blocks", self.num_blocks)
            self.check_split(i, linear_x={"lru_width": self.lru_width})
            gate = f"block_{i}/temporal_block/{self.recurrence}/recurrence_gate/kernel"
            check_layout(gate, num_blocks=self.num_blocks)
            kwargs |= self.stored("num_blocks", "a_initializer", "scale_first_input", "recurrence")
            return RecurrentBlock(self.lru_width, **kwargs)
        kwargs |= self.stored("head_dim", "rope_max_wavelength", "partial_rotary_factor")
        window = self.sliding_window if block_type == "local_attention" else None
        return self.make_attention(i, sliding_window=window, **kwargs)


def _check_block_types(backbone):
    """Raises an error for an unknown block type, or one whose arguments are missing."""
    for block_type in expand_block_types(backbone.block_types, backbone.num_layers, *NEEDS):
        for name in NEEDS[block_type]:
            if getattr(backbone, name) is None:
                raise ValueError(
                    f"`{name}` is needed for the {block_type!r} blocks of `block_types`, "
                    f"{backbone.block_types}. Received: None"
                )
