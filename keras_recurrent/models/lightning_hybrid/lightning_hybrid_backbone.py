"""Network of HypeNet and MiniCPM-SALA, and its residual block."""

import keras

from keras_recurrent.checks.arguments import check_factors, check_positive_integer
from keras_recurrent.layers import LightningAttention
from keras_recurrent.models.recurrent_backbone import (
    KEYS_AND_VALUES,
    RecurrentBackbone,
    check_network_sizes,
    expand_block_types,
)
from keras_recurrent.models.residual_block import ResidualBlock

LIGHTNING, GLOBAL = "lightning_attention", "global_attention"


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LightningHybridResidualBlock(ResidualBlock):
    """Residual block of HypeNet and MiniCPM-SALA, which mixes tokens and then channels.

    ```
    x = x + r temporal_block(RMSNorm(x))
    x = x + r SwiGLU(RMSNorm(x))
    ```

    Chen et al. 2026 (arXiv:2601.22156), with r = 1, and MiniCPM Team 2026 (arXiv:2602.11761).
    """


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LightningHybridBackbone(RecurrentBackbone):
    """Network of HypeNet and MiniCPM-SALA, from tokens to hidden states.

    Residual blocks (see `LightningHybridResidualBlock`) between an embedding and a final RMSNorm.
    By default, three of four blocks have Lightning Attention, with rotary positions and decays that
    are the slopes of ALiBi; the others have grouped-query attention to all earlier tokens, without
    positions. Both multiply their output by a sigmoid gate, computed from their input, before the
    output projection. Chen et al. 2026 (arXiv:2601.22156) and MiniCPM Team 2026 (arXiv:2602.11761).

    Args:
        block_types: a pattern of `"lightning_attention"` and `"global_attention"`, repeated up to
            `num_layers`; or one of these names, for all blocks. Defaults to three blocks of
            Lightning Attention and one of attention.
        num_lightning_heads: integer, heads of Lightning Attention. None: `num_query_heads`.
        num_lightning_key_value_heads: integer, heads of its keys and values, which must divide its
            number of heads. None: one for each head.
        lightning_head_dim: integer, the size of its heads. None: `head_dim`.
        lightning_query_scale: number, the factor of its queries. None: 1.
        rope_max_wavelength: number, the base of its rotary positions' wavelengths.
        use_qk_norm: boolean, whether the blocks of attention have an RMSNorm of each head of
            queries and keys, as in HypeNet. Lightning Attention always has them.
        attention_logit_scaling: number a of at least 2. In attention blocks, logits at position t
            are multiplied by ln(t + a) / ln(floor(a)); see `keras_recurrent.layers.LocalAttention`.
            None: 1.
        residual_scale: number, factor of the outputs of both layers of a residual block. None: 1.
        dense_length: integer. A sequence of this many tokens or more raises an error, because the
            attention of MiniCPM-SALA is then block-sparse, which is not implemented. Tokens in a
            cache, padding and all documents of a packed sequence count. None: attention to all
            earlier tokens at any length. This matches MiniCPM-SALA for fewer than 8,192 tokens, and
            differs from it for longer texts.

    Raises:
        ValueError: a sequence has `dense_length` tokens or more.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.models import LightningHybridBackbone
    >>> backbone = LightningHybridBackbone.from_preset("hypenet_tiny")
    >>> token_ids = np.array([[1, 100, 101, 102, 0]])
    >>> tuple(backbone({"token_ids": token_ids, "padding_mask": token_ids > 0}).shape)
    (1, 5, 128)
    """

    free_arguments = ("attention_logit_scaling", "dense_length")

    def __init__(
        self,
        vocabulary_size,
        num_layers,
        hidden_dim,
        intermediate_dim,
        num_query_heads,
        *,
        block_types=(LIGHTNING, LIGHTNING, LIGHTNING, GLOBAL),
        num_key_value_heads=1,
        head_dim=128,
        num_lightning_heads=None,
        num_lightning_key_value_heads=None,
        lightning_head_dim=None,
        lightning_query_scale=None,
        rope_max_wavelength=10_000,
        use_qk_norm=True,
        attention_logit_scaling=None,
        embedding_scale=None,
        residual_scale=None,
        output_scale=None,
        tie_word_embeddings=False,
        dense_length=None,
        layer_norm_epsilon=1e-6,
        dtype=None,
        name=None,
        trainable=True,
    ):
        check_network_sizes(vocabulary_size, num_layers, hidden_dim, intermediate_dim)
        check_factors(embedding_scale=embedding_scale, output_scale=output_scale)
        check_positive_integer("num_query_heads", num_query_heads)
        check_positive_integer("num_lightning_heads", num_lightning_heads, or_none=True)
        check_positive_integer(
            "num_lightning_key_value_heads", num_lightning_key_value_heads, or_none=True
        )
        check_positive_integer("lightning_head_dim", lightning_head_dim, or_none=True)
        check_positive_integer("dense_length", dense_length, or_none=True)
        block_types = expand_block_types(block_types, num_layers, LIGHTNING, GLOBAL)
        self.store_arguments(LightningHybridBackbone, locals())
        super().__init__(
            **self.make_arguments(LightningHybridResidualBlock, locals()),
            max_num_tokens=None if dense_length is None else dense_length - 1,
        )

    def make_mixer(self, i, **kwargs):
        kwargs |= self.stored("layer_norm_epsilon")
        if self.block_types[i] == GLOBAL:
            return self.make_attention(
                i,
                **self.stored("head_dim", "use_qk_norm"),
                partial_rotary_factor=0,
                use_output_bias=False,
                use_output_gate=True,
                logit_scaling=self.attention_logit_scaling,
                **kwargs,
            )
        num_heads = self.num_lightning_heads
        num_heads = self.num_query_heads if num_heads is None else num_heads
        head_dim = self.head_dim if self.lightning_head_dim is None else self.lightning_head_dim
        mixer = LightningAttention(
            num_heads,
            num_key_value_heads=self.num_lightning_key_value_heads,
            head_dim=head_dim,
            decay_schedule="alibi",
            rope_max_wavelength=self.rope_max_wavelength,
            query_scale=self.lightning_query_scale,
            use_qk_norm=True,
            use_norm_weight=True,
            query_key_activation="linear",
            gate_activation="sigmoid",
            **kwargs,
        )
        num_key_value_heads = self.num_lightning_key_value_heads or num_heads
        self.check_split(
            i,
            q_proj={"num_lightning_heads": num_heads},
            k_proj={"num_lightning_key_value_heads": num_key_value_heads},
        )
        return mixer

    def block_options(self, i):
        return self.stored("residual_scale")

    def too_long_reason(self):
        return (
            f"Attention is block-sparse from {self.dense_length} tokens on in MiniCPM-SALA, which "
            "is not implemented. `dense_length=None`, as in "
            "`from_preset(..., dense_length=None)`, attends to all earlier tokens instead, which "
            "the model was not trained with."
        )

    @staticmethod
    def weight_layout(data, model, num_devices, num_key_value_heads=1, attention_layers=None):
        layout = RecurrentBackbone.weight_layout(data, model, num_devices, num_key_value_heads)
        if attention_layers is not None:
            indices = "|".join(map(str, attention_layers)) or "none"
            keys = layout.pop(KEYS_AND_VALUES)
            layout[f"block_({indices})/.*(k_proj|v_proj)/kernel"] = keys
            layout[f"block_(?!({indices})/).*(k_proj|v_proj)/kernel"] = (data, model)
        return layout
