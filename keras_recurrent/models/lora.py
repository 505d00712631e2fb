"""Low-rank adapters (LoRA) of the networks."""

import keras

from keras_recurrent.checks.arguments import check_positive_integer


class LoraBackbone:
    """What networks do beyond KerasHub's `enable_lora` and `save_lora_weights`.

    A family adds `default_lora_layer_names`.
    """

    def enable_lora(self, rank, target_layer_names=None):
        """Freezes all weights, and adds low-rank ones, which train, beside those of some layers.

        LoRA, Hu et al. 2021 (arXiv:2106.09685): a layer's kernel W becomes W + A B, where A is
        random and B starts at 0, so that outputs are what they were. Afterwards A and B alone
        train: of these layers, and of any that had them before, such as a `token_embedding` after
        its own `enable_lora`. Compile the model anew.

        Args:
            rank: integer, the number of columns of A and of rows of B.
            target_layer_names: a list of names of layers with an `enable_lora` of their own: linear
                maps, and `"token_embedding"`. Every layer of such a name is meant, in all blocks.
                None: those of `default_lora_layer_names()`, the linear maps of the blocks that mix
                tokens. They are `linear_x`, `linear_y`, `linear_out`, `q_proj`, `k_proj`, `v_proj`
                and `o_proj` in a Griffin; `q_proj`, `f_proj`, `i_proj` and `o_proj` in an HGRN2;
                `q_proj`, `k_proj`, `v_proj`, `u_proj` and `o_proj` in a TransNormerLLM.

        Raises:
            ValueError: a `rank` below 1, names that are no list of strings, a name that no layer
                that takes LoRA has, or a layer that has LoRA already.

        Example:

        >>> import keras_recurrent
        >>> backbone = keras_recurrent.models.HGRN2Backbone.from_preset("hgrn2_tiny", num_layers=1)
        >>> backbone.enable_lora(rank=4, target_layer_names=["q_proj", "gate_proj"])
        >>> for weight in backbone.trainable_weights:
        ...     print(weight.path, tuple(weight.shape))
        block_0/temporal_block/q_proj/lora_kernel_a (128, 4)
        block_0/temporal_block/q_proj/lora_kernel_b (4, 128)
        block_0/mlp/gate_proj/lora_kernel_a (128, 4)
        block_0/mlp/gate_proj/lora_kernel_b (4, 352)
        """
        check_positive_integer("rank", rank)
        targets = self._lora_targets(target_layer_names)
        names = sorted({layer.name for layer in targets})
        super().enable_lora(rank, names)  # type: ignore[misc]
        # KerasHub lets biases, and the weights of untied logits, train, but does not save them.
        for layer in self._flatten_layers(include_self=False):  # type: ignore[attr-defined]
            if getattr(layer, "lora_enabled", False):
                layer.trainable = True
                for weight in layer.trainable_variables:
                    weight.trainable = weight.name.startswith("lora_")

    def _lora_targets(self, names):
        """The layers of these names, once all of them can get low-rank weights."""
        layers = [
            layer
            for layer in self._flatten_layers(include_self=False)  # type: ignore[attr-defined]
            if layer.weights and hasattr(layer, "enable_lora")
        ]
        if names is None:
            names = self.default_lora_layer_names()  # type: ignore[attr-defined]
        elif not isinstance(names, (list, tuple)) or not names:
            raise ValueError(f"`target_layer_names` must be a list of strings; got {names!r}.")
        else:
            known = sorted({layer.name for layer in layers})
            for name in names:
                if name not in known:
                    raise ValueError(
                        f"`target_layer_names` must be names of layers that take LoRA, of {known}; "
                        f"got {name!r}."
                    )
        targets = [layer for layer in layers if layer.name in names]
        for layer in targets:
            if layer.lora_enabled:
                raise ValueError(
                    f"`target_layer_names`: {layer.path!r} has LoRA already, which a layer gets "
                    "once. Name other layers: its low-rank weights go on to train beside theirs."
                )
        return targets

    def save_lora_weights(self, filepath):
        """Saves the low-rank weights beside linear maps, as in KerasHub.

        Raises:
            ValueError: layers have low-rank weights for which the file has no place: an embedding,
                or one that got them by its own `enable_lora`.
        """
        layers = self._flatten_layers(include_self=False)  # type: ignore[attr-defined]
        enabled = getattr(self, "_lora_enabled_layers", [])
        for i, layer in enumerate(layer for layer in layers if layer.weights):
            if not getattr(layer, "lora_enabled", False):
                continue
            if i not in enabled or isinstance(layer, keras.layers.Embedding):
                raise ValueError(
                    f"A file of `save_lora_weights` has no place for the low-rank weights of "
                    f"{layer.name!r}. Save all weights, with `save_weights` or `save_to_preset`."
                )
        super().save_lora_weights(filepath)  # type: ignore[misc]

    def load_lora_weights(self, filepath):
        """Reads the low-rank weights that `save_lora_weights` wrote.

        A network without any first gets them, as by `enable_lora` with the rank of the file and the
        default targets; compile the model anew then. With other targets, call `enable_lora` before.

        Args:
            filepath: the file, `*.lora.h5`.

        Raises:
            ValueError: the network has low-rank weights of another rank.
        """
        super().load_lora_weights(filepath)  # type: ignore[misc]
