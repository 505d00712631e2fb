"""Network of HGRN2 and its hybrids with attention, and its residual block."""

import keras
from keras import ops

from keras_recurrent.checks.arguments import check_boolean, check_positive_integer, is_integer
from keras_recurrent.layers import HGRN2, LocalAttention, LowerBounds
from keras_recurrent.layers.lower_bounds import BoundedLayer
from keras_recurrent.layers.remat import no_further_remat
from keras_recurrent.models.recurrent_backbone import RecurrentBackbone, check_network_sizes
from keras_recurrent.models.residual_block import ResidualBlock


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2ResidualBlock(BoundedLayer, ResidualBlock):
    """Residual block of HGRN2, which mixes tokens and then channels.

    ```
    x = x + temporal_block(RMSNorm(x))
    x = x + SwiGLU(RMSNorm(x))
    ```

    Qin et al. 2024 (arXiv:2404.07904, section 3).

    Args:
        temporal_block: the layer that mixes tokens, a `keras_recurrent.layers.HGRN2`, `HGRN` or
            `LocalAttention`.

    Call arguments:
        lower_bound: `[2, D]`, log β and log(1 - β), one entry of the output of
            `keras_recurrent.layers.LowerBounds`; None: β is 0. Attention has none.
    """


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2Backbone(RecurrentBackbone):
    """Network of HGRN2 and its hybrids with attention, from tokens to hidden states.

    Residual blocks (see `HGRN2ResidualBlock`) between an embedding and a final RMSNorm, with one
    table of lower bounds for the forget gates of all blocks. The bounds increase from block to
    block, which lengthens the shortest memory. Qin et al. 2024, arXiv:2404.07904.

    In a hybrid, the blocks of `attention_layers` have grouped-query attention with rotary positions
    in place of HGRN2, as in the hybrid models of flash-linear-attention. Attention blocks
    do not use their lower bounds, which still raise the bounds of the following blocks. Without a
    `sliding_window`, the cache of attention blocks grows with the length of the text.

    Args:
        intermediate_dim: integer, the width inside the SwiGLU, about 8 D / 3.
        expand_ratio: integer, the size K of a head, which must divide D. The state of a block has
            K D numbers. Defaults to 128.
        conv_size: integer, taps of short convolutions after the projections. None: no convolutions.
        use_lower_bounds: boolean. False: all lower bounds are 0, as in the first block.
        gate_activation, input_activation: as in `keras_recurrent.layers.HGRN2`, whose defaults are
            those of the published checkpoints; the paper prints `"sigmoid"` and `"silu"`.
        layer_norm_epsilon: float, ε of the blocks' norms and the final norm. The norm inside the
            layers that mix tokens has 1e-5.
        attention_layers: a tuple of integers, the indices of the blocks with attention, from 0.
            If it is empty, the arguments from `num_query_heads` to `use_qkv_bias` have no effect.
        num_query_heads: integer, the number of query heads, which must divide D into heads of an
            even size.
        num_key_value_heads: integer, heads of keys and values, which must divide
            `num_query_heads`. None: `num_query_heads`.
        sliding_window: integer, the number of tokens that a token attends to, including itself.
            None: all earlier tokens and itself.
        use_qkv_bias: boolean, whether queries, keys and values have biases.

    Raises:
        ValueError: `expand_ratio` does not divide `hidden_dim`, `conv_size` is invalid,
            `attention_layers` are not distinct indices of blocks, or `num_query_heads` is missing
            with `attention_layers`.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.models import HGRN2Backbone
    >>> backbone = HGRN2Backbone.from_preset("hgrn2_tiny")
    >>> token_ids = np.array([[1, 100, 101, 102, 0]])
    >>> tuple(backbone({"token_ids": token_ids, "padding_mask": token_ids > 0}).shape)
    (1, 5, 128)
    """

    def __init__(
        self,
        vocabulary_size,
        num_layers,
        hidden_dim,
        intermediate_dim,
        *,
        expand_ratio=128,
        conv_size=None,
        use_lower_bounds=True,
        tie_word_embeddings=False,
        gate_activation="silu",
        input_activation="linear",
        layer_norm_epsilon=1e-6,
        attention_layers=(),
        num_query_heads=None,
        num_key_value_heads=None,
        sliding_window=None,
        rope_max_wavelength=10_000,
        use_qkv_bias=False,
        dtype=None,
        name=None,
        trainable=True,
    ):
        check_network_sizes(vocabulary_size, num_layers, hidden_dim, intermediate_dim)
        check_positive_integer("expand_ratio", expand_ratio)
        check_boolean("use_lower_bounds", use_lower_bounds)
        attention_layers = _check_attention_layers(attention_layers, num_layers)
        if num_key_value_heads is None:
            num_key_value_heads = num_query_heads
        if attention_layers:
            _check_query_heads(num_query_heads, hidden_dim)
        self.store_arguments(HGRN2Backbone, locals())
        arguments = self.make_arguments(HGRN2ResidualBlock, locals())
        self.lower_bounds = None
        if use_lower_bounds and bounded_layers(num_layers, attention_layers):
            with no_further_remat():
                self.lower_bounds = LowerBounds(num_layers, dtype=dtype, name="lower_bounds")
        super().__init__(**arguments)

    def make_mixer(self, i, **kwargs):
        if i not in self.attention_layers:
            self.check_split(i, q_proj={"num_heads": self.hidden_dim // self.expand_ratio})
            names = "expand_ratio", "gate_activation", "input_activation", "conv_size"
            return HGRN2(**self.stored(*names), **kwargs)
        kwargs |= self.stored("sliding_window", "rope_max_wavelength", "use_qkv_bias")
        head_dim = self.hidden_dim // self.num_query_heads
        return self.make_attention(i, head_dim=head_dim, use_output_bias=False, **kwargs)

    def block_arguments(self, embeddings):
        arguments = super().block_arguments(embeddings)
        if self.lower_bounds is not None:
            bounds = ops.unstack(self.lower_bounds(embeddings), self.num_layers - 1)
            for i, block in enumerate(self.transformer_layers[1:], start=1):
                if not isinstance(block.temporal_block, LocalAttention):
                    arguments[i] = {"lower_bound": bounds[i - 1]}
        return arguments

    @staticmethod
    def weight_layout(data, model, num_devices, num_key_value_heads=1):
        layout = RecurrentBackbone.weight_layout(data, model, num_devices, num_key_value_heads)
        return {**layout, "block.*temporal_block/norm/scale": (model,)}


def bounded_layers(num_layers, attention_layers):
    """Returns the indices of the blocks whose forget gates have a learned lower bound."""
    return [i for i in range(1, num_layers) if i not in attention_layers]


def _check_attention_layers(attention_layers, num_layers):
    """Returns the indices of the blocks with attention as a sorted tuple."""
    indices = attention_layers if isinstance(attention_layers, (tuple, list)) else (None,)
    if not all(is_integer(i) and 0 <= i < num_layers for i in indices) or len(set(indices)) != len(
        indices
    ):
        raise ValueError(
            "`attention_layers` must be a tuple of distinct integers from 0 to `num_layers` - 1, "
            f"{num_layers - 1}; got {attention_layers!r}."
        )
    return tuple(sorted(map(int, indices)))


def _check_query_heads(num_query_heads, hidden_dim):
    if num_query_heads is None:
        raise ValueError(
            "`num_query_heads` is needed for the blocks with attention, `attention_layers`; got "
            "None."
        )
    check_positive_integer("num_query_heads", num_query_heads)
    if hidden_dim % (2 * num_query_heads):
        raise ValueError(
            f"`num_query_heads` must divide `hidden_dim`, {hidden_dim}, into heads of an even "
            f"size, for rotary positions; got {num_query_heads}."
        )
