"""The network of Hawk and Griffin, from tokens to hidden states."""

import keras
import keras_hub
from keras import ops

from keras_recurrent.layers import RecurrentBlock, RMSNorm
from keras_recurrent.models import presets
from keras_recurrent.models.griffin.griffin_residual_block import GriffinResidualBlock
from keras_recurrent.models.segments import SegmentsOptional


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinBackbone(SegmentsOptional, keras_hub.models.Backbone):
    """The network of Hawk and Griffin: token ids in, the hidden states before the logits out.

    Residual blocks (see `GriffinResidualBlock`) between an embedding, whose weights are also those
    of the logits, and a last RMSNorm. De et al. 2024, arXiv:2402.19427, section 2. `block_types`
    says what mixes the tokens: Hawk is all `"recurrent"`.

    Args:
        vocabulary_size: integer, the number of tokens.
        num_layers: integer, the number of residual blocks, the paper's depth.
        hidden_dim: integer, the width D of the residual stream.
        lru_width: integer, the width D_rnn inside the recurrent blocks, near 4 D / 3.
        intermediate_dim: integer, the width inside the gated MLP: 3 D in the paper.
        num_blocks: integer, blocks of the RG-LRU's block-diagonal gates; must divide `lru_width`.
            Defaults to 16.
        block_types: a pattern of `"recurrent"`, repeated and cut at `num_layers`.
        layer_norm_epsilon: float, ε of all RMSNorms.
        dtype: a dtype, policy or its name; `"mixed_bfloat16"` computes in bfloat16 but keeps
            weights, recurrences and their states in float32.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: a dictionary of `token_ids` `[B, T]`, `padding_mask` `[B, T]` (True or 1 at real
            tokens; padding may stand anywhere in a row and changes nothing), and optionally
            `segment_ids` `[B, T]`, at least 0, one number for each of several documents in a row,
            which then know nothing of each other.

    Returns:
        `[B, T, hidden_dim]`, in the compute dtype.

    Raises:
        ValueError: an unknown block type, an empty pattern, or a `num_blocks` that does not divide
            `lru_width`.

    Example:

    >>> import numpy as np
    >>> import keras_recurrent
    >>> backbone = keras_recurrent.models.GriffinBackbone(
    ...     vocabulary_size=259,
    ...     num_layers=2,
    ...     hidden_dim=24,
    ...     lru_width=32,
    ...     intermediate_dim=72,
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
        lru_width,
        intermediate_dim,
        num_blocks=16,
        block_types=("recurrent",),
        layer_norm_epsilon=1e-6,
        dtype=None,
        name=None,
        trainable=True,
    ):
        temporal_blocks = {
            "recurrent": lambda: RecurrentBlock(
                lru_width, num_blocks=num_blocks, dtype=dtype, name="temporal_block"
            ),
        }
        block_types = tuple(block_types)
        _check_block_types(block_types, supported=tuple(temporal_blocks))

        # === Layers ===
        # Only blocks recompute under `keras.RematScope`: the logits call the embedding with a flag.
        with keras.RematScope(mode=None):
            self.token_embedding = keras.layers.ReversibleEmbedding(
                vocabulary_size,
                hidden_dim,
                # Logits of about unit variance: the last norm leaves states of unit size.
                embeddings_initializer=keras.initializers.RandomNormal(stddev=hidden_dim**-0.5),
                # By itself, Keras computes logits in float32 inside a model, though not outside.
                reverse_dtype=keras.dtype_policies.get(dtype).compute_dtype,
                dtype=dtype,
                name="token_embedding",
            )
            mixers = [
                temporal_blocks[block_types[i % len(block_types)]]() for i in range(num_layers)
            ]
            self.final_norm = RMSNorm(layer_norm_epsilon, dtype=dtype, name="final_norm")
        self.transformer_layers = [
            GriffinResidualBlock(
                mixer, intermediate_dim, layer_norm_epsilon, dtype=dtype, name=f"block_{i}"
            )
            for i, mixer in enumerate(mixers)
        ]

        # === Functional model ===
        inputs = {
            key: keras.Input((None,), dtype="int32", name=key)
            for key in ("token_ids", "padding_mask", "segment_ids")
        }
        mask = ops.cast(inputs["padding_mask"], "bool")
        x = self.token_embedding(inputs["token_ids"])
        for block in self.transformer_layers:
            # Keras would attach a `mask` to all that follows, and rescale the loss by it.
            x = block(x, inputs_mask=mask, segment_ids=inputs["segment_ids"])
        super().__init__(
            inputs=inputs, outputs=self.final_norm(x), dtype=dtype, name=name, trainable=trainable
        )

        # === Config ===
        self.vocabulary_size = vocabulary_size
        self.num_layers = num_layers
        self.hidden_dim = hidden_dim
        self.lru_width = lru_width
        self.intermediate_dim = intermediate_dim
        self.num_blocks = num_blocks
        self.block_types = block_types
        self.layer_norm_epsilon = layer_norm_epsilon

    @classmethod
    def from_preset(cls, preset, load_weights=None, **kwargs):
        """A backbone by the name of its sizes, or from a directory of `save_to_preset`.

        As in `GriffinCausalLM.from_preset`, with the backbone's arguments alone.

        Example:

        >>> import keras_recurrent
        >>> backbone = keras_recurrent.models.GriffinBackbone.from_preset("hawk_tiny")
        >>> backbone.count_params()
        921088
        """
        presets.check_overrides(preset, [cls], kwargs)
        load_weights = presets.resolve_load_weights(preset, load_weights)
        kwargs = presets.resolve_backbone_overrides(preset, kwargs)
        return super().from_preset(preset, load_weights, **kwargs)

    def get_initial_state(self, batch_size):
        """The generation cache in which nothing was seen: a tuple of the blocks' states.

        Its size depends on the batch and the model alone, not on the length of the text.
        """
        return tuple(block.get_initial_state(batch_size) for block in self.transformer_layers)

    def rematerialized_call(self, layer_call, *args, **kwargs):
        return layer_call  # its blocks recompute, the whole would keep nothing

    def default_lora_layer_names(self):
        """The linear maps of the recurrent blocks, for `enable_lora`."""
        return ["linear_x", "linear_y", "linear_out"]

    def enable_lora(self, rank, target_layer_names=None):
        """Freezes all weights but new low-rank ones beside some kernels, as in KerasHub."""
        super().enable_lora(rank, target_layer_names)
        # KerasHub leaves the biases beside those kernels to train, but never saves them.
        for layer in self._flatten_layers(include_self=False):
            if getattr(layer, "lora_enabled", False) and layer.bias is not None:
                layer.bias.trainable = False

    @staticmethod
    def get_layout_map(
        device_mesh, model_parallel_dim_name="model", data_parallel_dim_name="batch"
    ):
        """How to lay the weights over devices, for `keras.distribution.ModelParallel`.

        Inside a recurrent block every channel keeps to itself, and its gates to their blocks: the
        `lru_width` and the MLP's `intermediate_dim` are split along the model axis, so that a
        block communicates only where it returns to the residual stream. The width of the residual
        stream is split along the data axis. Small weights, such as norms, are copied.

        Args:
            device_mesh: a `keras.distribution.DeviceMesh`.
            model_parallel_dim_name: string, its axis for the model. Its size must divide
                `vocabulary_size`, `lru_width`, `num_blocks` and `intermediate_dim`.
            data_parallel_dim_name: string, its axis for the data. Its size must divide
                `hidden_dim`.

        Returns:
            A `keras.distribution.LayoutMap`.

        Raises:
            ValueError: `device_mesh` is no mesh or lacks an axis of these names.

        Example:

        ```python
        mesh = keras.distribution.DeviceMesh(
            (1, 8), ("batch", "model"), keras.distribution.list_devices()
        )
        distribution = keras.distribution.ModelParallel(
            layout_map=GriffinBackbone.get_layout_map(mesh), batch_dim_name="batch"
        )
        with distribution.scope():
            model = GriffinCausalLM.from_preset("hawk_1.3b")
        ```
        """
        if not isinstance(device_mesh, keras.distribution.DeviceMesh):
            raise ValueError(
                "`device_mesh` must be a `keras.distribution.DeviceMesh`. Received: "
                f"{type(device_mesh).__name__}"
            )
        data, model = data_parallel_dim_name, model_parallel_dim_name
        for argument, name in (
            ("data_parallel_dim_name", data),
            ("model_parallel_dim_name", model),
        ):
            if name not in device_mesh.axis_names:
                raise ValueError(
                    f"`{argument}` must be an axis of `device_mesh`, one of "
                    f"{device_mesh.axis_names}. Received: {name!r}"
                )
        layout_map = keras.distribution.LayoutMap(device_mesh)
        layout_map["token_embedding/embeddings"] = (model, data)
        layout_map["block.*(linear_x|linear_y|gate_proj|up_proj)/kernel"] = (data, model)
        layout_map["block.*(linear_x|linear_y|gate_proj|up_proj)/bias"] = (model,)
        layout_map["block.*(linear_out|down_proj)/kernel"] = (model, data)
        layout_map["block.*conv1d/kernel"] = (None, model)
        layout_map["block.*conv1d/bias"] = (model,)
        layout_map["block.*rg_lru/a_logit"] = (model,)
        layout_map["block.*rg_lru/(recurrence_gate|input_gate)/kernel"] = (model, None, None)
        return layout_map

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "num_layers": self.num_layers,
            "hidden_dim": self.hidden_dim,
            "lru_width": self.lru_width,
            "intermediate_dim": self.intermediate_dim,
            "num_blocks": self.num_blocks,
            "block_types": self.block_types,
            "layer_norm_epsilon": self.layer_norm_epsilon,
        }


def _check_block_types(block_types, supported):
    if not block_types or not set(block_types) <= set(supported):
        raise ValueError(
            f"`block_types` must be a pattern of {', '.join(map(repr, supported))}: this version "
            f"has no other blocks. Received: {block_types}"
        )
