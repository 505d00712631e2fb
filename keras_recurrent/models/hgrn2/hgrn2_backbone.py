"""The network of HGRN2, from tokens to hidden states."""

import keras

from keras_recurrent.checks.arguments import check_boolean
from keras_recurrent.devices.jax_layouts import check_layout, get_weight_axis, make_layout_map
from keras_recurrent.layers import HGRN2, LowerBounds, RMSNorm
from keras_recurrent.layers.remat import no_further_remat
from keras_recurrent.layers.reversible_embedding import reversible_embedding
from keras_recurrent.models.hgrn2.hgrn2_residual_block import HGRN2ResidualBlock
from keras_recurrent.models.recurrent_backbone import RecurrentBackbone, check_layouts, check_sizes


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2Backbone(RecurrentBackbone):
    """The network of HGRN2: tokens in, hidden states out.

    Residual blocks (see `HGRN2ResidualBlock`) between an embedding and a last RMSNorm, with one
    table of lower bounds for the forget gates of all blocks: the higher a block, the longer it
    remembers at least. Qin et al. 2024, arXiv:2404.07904.

    Args:
        vocabulary_size: integer, the number of tokens.
        num_layers: integer, the number of residual blocks.
        hidden_dim: integer, the width D of the residual stream.
        intermediate_dim: integer, the width inside the SwiGLU, about 8 D / 3.
        expand_ratio: integer, the size K of a head, of which D is a multiple: how much larger than
            D the state of a block is. Defaults to 128.
        conv_size: integer, the tokens that short convolutions behind the linear maps see; None:
            there are none.
        use_lower_bounds: boolean; without, all lower bounds are 0, as is that of the first block.
        tie_word_embeddings: boolean, whether the logits come from the embedding's own weights, and
            not from weights of their own.
        gate_activation, input_activation: as in `keras_recurrent.layers.HGRN2`, whose defaults are
            those of the published checkpoints; the paper prints `"sigmoid"` and `"silu"`.
        layer_norm_epsilon: float, ε of the blocks' norms and the last. That inside the layers that
            mix tokens has 1e-5.
        dtype: a dtype, policy or its name; `"mixed_bfloat16"` computes in bfloat16 but keeps
            weights, forget gates, recurrences and their states in float32.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: a dictionary of `token_ids` `[B, T]`, `padding_mask` `[B, T]` (True or 1 at real
            tokens; padding may stand anywhere in a row and changes nothing), and optionally
            `segment_ids` `[B, T]`, at least 0, one number for each of several documents in a row,
            which then know nothing of each other, as in `keras_recurrent.layers.StreamingLayer`.

    Returns:
        `[B, T, hidden_dim]`, in the compute dtype.

    Raises:
        ValueError: a size below 1, an `expand_ratio` that does not divide `hidden_dim`, or a bad
            `conv_size`.

    Example:

    >>> import numpy as np
    >>> import keras_recurrent
    >>> backbone = keras_recurrent.models.HGRN2Backbone(
    ...     vocabulary_size=259,
    ...     num_layers=2,
    ...     hidden_dim=24,
    ...     intermediate_dim=64,
    ...     expand_ratio=8,
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
        expand_ratio=128,
        conv_size=None,
        use_lower_bounds=True,
        tie_word_embeddings=False,
        gate_activation="silu",
        input_activation="linear",
        layer_norm_epsilon=1e-6,
        dtype=None,
        name=None,
        trainable=True,
    ):
        check_sizes(
            vocabulary_size=vocabulary_size,
            num_layers=num_layers,
            hidden_dim=hidden_dim,
            intermediate_dim=intermediate_dim,
            expand_ratio=expand_ratio,
        )
        check_boolean("use_lower_bounds", use_lower_bounds)
        check_boolean("tie_word_embeddings", tie_word_embeddings)
        check_layouts(vocabulary_size, hidden_dim, intermediate_dim)
        num_heads = hidden_dim // expand_ratio
        check_layout(
            "block_0/temporal_block/q_proj/kernel", hidden_dim=hidden_dim, num_heads=num_heads
        )
        # Only blocks are recomputed under a `keras.RematScope`.
        with no_further_remat():
            token_embedding = reversible_embedding(
                vocabulary_size, hidden_dim, tie_word_embeddings, dtype=dtype
            )
            # A block by itself has nothing to learn of bounds.
            self.lower_bounds = None
            if use_lower_bounds and num_layers > 1:
                self.lower_bounds = LowerBounds(num_layers, dtype=dtype, name="lower_bounds")
            mixers = [
                HGRN2(
                    expand_ratio,
                    gate_activation,
                    input_activation,
                    conv_size,
                    dtype=dtype,
                    name="temporal_block",
                )
                for _ in range(num_layers)
            ]
            final_norm = RMSNorm(
                layer_norm_epsilon, zero_centered=False, dtype=dtype, name="final_norm"
            )
        blocks = [
            HGRN2ResidualBlock(
                mixer, intermediate_dim, layer_norm_epsilon, dtype=dtype, name=f"block_{i}"
            )
            for i, mixer in enumerate(mixers)
        ]
        super().__init__(
            token_embedding, blocks, final_norm, dtype=dtype, name=name, trainable=trainable
        )

        self.store_arguments(
            vocabulary_size=vocabulary_size,
            num_layers=num_layers,
            hidden_dim=hidden_dim,
            intermediate_dim=intermediate_dim,
            expand_ratio=expand_ratio,
            conv_size=conv_size,
            use_lower_bounds=use_lower_bounds,
            tie_word_embeddings=tie_word_embeddings,
            gate_activation=gate_activation,
            input_activation=input_activation,
            layer_norm_epsilon=layer_norm_epsilon,
        )

    def block_arguments(self, embeddings):
        if self.lower_bounds is None:
            return super().block_arguments(embeddings)
        bounds = self.lower_bounds(embeddings)
        above = range(len(self.transformer_layers) - 1)
        return [{}, *({"lower_bound": bounds[i]} for i in above)]

    def default_lora_layer_names(self):
        """The linear maps of the blocks that mix tokens, for `enable_lora`."""
        return ["q_proj", "f_proj", "i_proj", "o_proj"]

    @staticmethod
    def get_layout_map(
        device_mesh, model_parallel_dim_name="model", data_parallel_dim_name="batch"
    ):
        """How to lay the weights over devices, for `keras.distribution.ModelParallel`.

        Heads keep to themselves up to the norm before the output: they, and the SwiGLU's
        `intermediate_dim`, are split along the model axis. Along the data axis the other dimension
        of weights is split, and gathered where they are used, while activations are split by rows
        (FSDP, or ZeRO-3): a mesh of (8, 1) is FSDP, one of (1, 8) tensor parallelism, others are
        both. States and caches are split by rows and heads or channels. Small weights, such as
        norms and lower bounds, are copied.

        A third axis, named "sequence", is for rows longer than a device (sequence parallelism): it
        splits the tokens of rows, whose number it must divide, as
        `keras_recurrent.devices.jax_layouts` tells.
        Where the data axis has one device, weights are split along this one in its place.

        Args:
            device_mesh: a `keras.distribution.DeviceMesh`.
            model_parallel_dim_name: string, its axis for the model. Its size must divide
                `vocabulary_size`, the number of heads and `intermediate_dim`.
            data_parallel_dim_name: string, its axis for the data. Its size must divide
                `hidden_dim`.

        Returns:
            A `keras.distribution.LayoutMap`.

        Raises:
            ValueError: `device_mesh` is no mesh or lacks an axis of these names. A backbone raises
                it where an axis does not divide what it splits, before it makes weights.

        Example:

        ```python
        mesh = keras.distribution.DeviceMesh(
            (1, 8), ("batch", "model"), keras.distribution.list_devices()
        )
        distribution = keras.distribution.ModelParallel(
            layout_map=HGRN2Backbone.get_layout_map(mesh), batch_dim_name="batch"
        )
        with distribution.scope():
            model = HGRN2CausalLM.from_preset("hgrn2_1.3b_100b")
        ```
        """
        data, model = data_parallel_dim_name, model_parallel_dim_name
        layout_map = make_layout_map(device_mesh, model, data)
        data = get_weight_axis(device_mesh, data)
        layout_map["token_embedding/reverse_embeddings"] = (data, model)
        layout_map["block.*(q_proj|f_proj|i_proj|gate_proj|up_proj)/kernel"] = (data, model)
        layout_map["block.*(o_proj|down_proj)/kernel"] = (model, data)
        layout_map["block.*conv1d/kernel"] = (None, model)
        layout_map["block.*temporal_block/norm/scale"] = (model,)
        return layout_map
