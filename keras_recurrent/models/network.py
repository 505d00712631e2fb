"""Base class of all networks: arguments of constructors, and LoRA (low-rank adaptation)."""

import inspect

import h5py
import keras
import keras_hub

from keras_recurrent import atomic_files
from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.compat import BackendNeutralCompileConfig
from keras_recurrent.devices.jax_processes import SavedByAllProcesses
from keras_recurrent.layers.saved_quantization import SavedQuantization
from keras_recurrent.models.preset_loading import PresetLoading

PLAIN = (str, int, float, tuple, type(None))


class Network(
    BackendNeutralCompileConfig,
    SavedByAllProcesses,
    SavedQuantization,
    PresetLoading,
    keras_hub.models.Backbone,
):
    """Base class of all networks.

    `get_config` has the arguments of `store_arguments`. KerasHub's `enable_lora` and
    `save_lora_weights` are extended.
    """

    _argument_names: tuple = ()

    def store_arguments(self, cls, values):
        """Stores the arguments that `from_config` needs, after the base class is constructed.

        Args:
            cls: the class whose constructor calls this method. All its arguments are stored, except
                `dtype`, `name` and `trainable`.
            values: the `locals()` of its constructor.
        """
        parameters = list(inspect.signature(cls.__init__).parameters)[1:]  # without `self`
        names = [name for name in parameters if name not in ("dtype", "name", "trainable")]
        for name in names:
            setattr(self, name, values[name])
        self._argument_names = tuple(names)

    def stored(self, *names):
        """Returns a dictionary of stored arguments, for layers with arguments of the same names."""
        return {name: getattr(self, name) for name in names}

    def get_config(self):
        config = super().get_config()
        for name in self._argument_names:
            value = getattr(self, name)
            plain = isinstance(value, PLAIN)
            config[name] = value if plain else keras.saving.serialize_keras_object(value)
        return config

    # === LoRA ===

    def default_lora_layer_names(self):
        """Returns the names of the linear layers that mix tokens, in all families."""
        return [
            *("linear_x", "linear_y", "linear_out", "q_proj", "f_proj", "i_proj", "k_proj"),
            *("v_proj", "u_proj", "b_proj", "c_proj", "z_proj", "x_proj", "bc_proj", "dt_proj"),
            "o_proj",
        ]

    def enable_lora(self, rank, target_layer_names=None):
        """Freezes all weights and adds trainable low-rank weights to some layers.

        LoRA, Hu et al. 2021 (arXiv:2106.09685): a layer's kernel W becomes W + A B, where A is
        random and B is initialized with 0, so the outputs do not change. Afterwards only A and B of
        these layers are trained, and those of layers that have LoRA already, such as a
        `token_embedding` after its `enable_lora`. Compile the model again.

        Args:
            rank: integer, the number of columns of A and of rows of B.
            target_layer_names: a list of names of layers with an `enable_lora` method, linear
                layers and `"token_embedding"`. A name applies to the layers in all blocks. None:
                `default_lora_layer_names()`, the linear layers that mix tokens. They are
                `linear_x`, `linear_y`, `linear_out`, `q_proj`, `k_proj`, `v_proj` and `o_proj` in
                Griffin; `q_proj`, `f_proj`, `i_proj` and `o_proj` in HGRN2; `q_proj`, `k_proj`,
                `v_proj`, `u_proj` and `o_proj` in TransNormerLLM, HypeNet and MiniCPM-SALA;
                these and `b_proj` and `c_proj` in LFM2; and
                `z_proj`, `x_proj`, `bc_proj`, `dt_proj`, `q_proj`, `k_proj`, `v_proj` and `o_proj`
                in Nemotron-H, Granite 4.0 H, Falcon-H1 and Mamba-2.

        Raises:
            ValueError: `rank` is below 1, `target_layer_names` is not a list of strings, no layer
                with LoRA support has one of the names, or a layer has LoRA already.

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
        super().enable_lora(rank, names)
        # KerasHub also trains biases and the weights of untied logits, but does not save them.
        for layer in self._flatten_layers(include_self=False):
            if getattr(layer, "lora_enabled", False):
                layer.trainable = True
                for weight in layer.trainable_variables:
                    weight.trainable = weight.name.startswith("lora_")

    def _layers_with_weights(self):
        """Returns the layers that have weights, which KerasHub's files of LoRA number."""
        return [layer for layer in self._flatten_layers(include_self=False) if layer.weights]

    def _lora_targets(self, names):
        """Returns the layers with these names, or raises an error if one cannot have LoRA."""
        layers = [v for v in self._layers_with_weights() if hasattr(v, "enable_lora")]
        if names is None:
            names = self.default_lora_layer_names()
        elif not isinstance(names, (list, tuple)) or not names:
            raise ValueError(f"`target_layer_names` must be a list of strings; got {names!r}.")
        else:
            known = sorted({layer.name for layer in layers})
            for name in names:
                if name not in known:
                    raise ValueError(
                        f"`target_layer_names` must be names of layers that support LoRA, {known}; "
                        f"got {name!r}."
                    )
        targets = [layer for layer in layers if layer.name in names]
        for layer in targets:
            if layer.lora_enabled:
                raise ValueError(
                    f"`target_layer_names`: {layer.path!r} has LoRA already, which can be enabled "
                    "only once. Leave it out: its low-rank weights are trained, too."
                )
        return targets

    def save_lora_weights(self, filepath):
        """Saves the low-rank weights of linear layers, as in KerasHub.

        Raises:
            ValueError: the file cannot hold the low-rank weights of a layer: of an embedding, or of
                a layer whose own `enable_lora` was called.
        """
        enabled = getattr(self, "_lora_enabled_layers", [])
        for i, layer in enumerate(self._layers_with_weights()):
            if not getattr(layer, "lora_enabled", False):
                continue
            if i not in enabled or isinstance(layer, keras.layers.Embedding):
                raise ValueError(
                    f"A file of `save_lora_weights` cannot hold the low-rank weights of "
                    f"{layer.name!r}. Save all weights, with `save_weights` or `save_to_preset`."
                )
        with atomic_files.replace(filepath) as path:
            super().save_lora_weights(path)

    def load_lora_weights(self, filepath):
        """Loads a file of `save_lora_weights`.

        On a network without LoRA, calls `enable_lora` with the rank of the file and the default
        targets; compile the model again in this case. For other targets, call `enable_lora` before.

        Args:
            filepath: string, the file, `*.lora.h5`.

        Raises:
            ValueError: the network has low-rank weights of another rank, or the file has weights of
                other layers or sizes. The network does not change.
        """
        with h5py.File(filepath) as file:
            groups = {int(i): group["vars"] for i, group in file["lora"].items() if i != "vars"}
            found = {
                i: (*group["lora_kernel_a"].shape[:-1], group["lora_kernel_b"].shape[-1])
                for i, group in groups.items()
            }
        layers = self._layers_with_weights()
        enabled = getattr(self, "_lora_enabled_layers", [])
        targets = [layers[i] for i in enabled] or self._lora_targets(None)
        wanted = {i: tuple(v.kernel.shape) for i, v in enumerate(layers) if v in targets}
        if found != wanted:
            raise ValueError(
                f"`filepath` must have low-rank weights of the {len(wanted)} layers that LoRA "
                f"adapts in this network; got {filepath!r}, with {len(found)} layers, of other "
                "sizes or at other places. Load it into a model of the same preset; if "
                "`enable_lora` had other targets, call it first."
            )
        super().load_lora_weights(filepath)
