"""Network of LFM2 and LFM2.5, and its residual block."""

import keras

from keras_recurrent.checks.arguments import check_boolean, check_positive_integers
from keras_recurrent.devices.jax_layouts import check_layout
from keras_recurrent.layers import GatedShortConv
from keras_recurrent.models.recurrent_backbone import (
    RecurrentBackbone,
    check_network_sizes,
    expand_block_types,
)
from keras_recurrent.models.residual_block import ResidualBlock

CONVOLUTION, ATTENTION = "gated_short_conv", "global_attention"


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LFM2ResidualBlock(ResidualBlock):
    """Residual block of LFM2, which mixes tokens and then channels.

    ```
    x = x + temporal_block(RMSNorm(x))
    x = x + SwiGLU(RMSNorm(x))
    ```

    Liquid AI 2025 (arXiv:2511.23404).
    """


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LFM2Backbone(RecurrentBackbone):
    """Network of LFM2 and LFM2.5, from tokens to hidden states.

    Residual blocks (see `LFM2ResidualBlock`) between an embedding and a final RMSNorm. Most blocks
    have a gated short convolution; the others have grouped-query attention to all earlier tokens,
    with rotary positions and norms of queries and keys. Liquid AI 2025 (arXiv:2511.23404).

    The state of a convolution block has a constant size, a few tokens. The cache of an attention
    block grows with the length of the text.

    Args:
        hidden_dim: integer, the width D of the residual stream and of the convolutions.
        block_types: a pattern of `"gated_short_conv"` and `"global_attention"`, repeated up to
            `num_layers`; or one of these names, for all blocks. Defaults to two
            convolution blocks and one attention block.
        conv_size: integer, the number of taps of the convolutions. Defaults to 3.
        use_conv_bias: boolean, whether the convolutions and the linear layers around them have
            biases.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.models import LFM2Backbone
    >>> backbone = LFM2Backbone.from_preset("lfm2_tiny")
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
        intermediate_dim,
        num_query_heads,
        *,
        block_types=(CONVOLUTION, CONVOLUTION, ATTENTION),
        num_key_value_heads=1,
        head_dim=64,
        conv_size=3,
        use_conv_bias=False,
        rope_max_wavelength=1_000_000,
        max_position_embeddings=None,
        tie_word_embeddings=True,
        layer_norm_epsilon=1e-5,
        dtype=None,
        name=None,
        trainable=True,
    ):
        check_network_sizes(vocabulary_size, num_layers, hidden_dim, intermediate_dim)
        check_positive_integers(num_query_heads=num_query_heads, conv_size=conv_size)
        check_boolean("use_conv_bias", use_conv_bias)
        block_types = expand_block_types(block_types, num_layers, CONVOLUTION, ATTENTION)
        self.store_arguments(LFM2Backbone, locals())
        super().__init__(**self.make_arguments(LFM2ResidualBlock, locals()))

    def make_mixer(self, i, **kwargs):
        if self.block_types[i] == ATTENTION:
            kwargs |= self.stored("head_dim", "rope_max_wavelength", "layer_norm_epsilon")
            return self.make_attention(i, use_output_bias=False, use_qk_norm=True, **kwargs)
        path = f"block_{i}/temporal_block/conv1d/kernel"
        check_layout(path, conv_size=self.conv_size, hidden_dim=self.hidden_dim)
        return GatedShortConv(self.conv_size, use_bias=self.use_conv_bias, **kwargs)
