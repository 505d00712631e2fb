"""Private names of Keras, KerasHub and torch; see also `upstream.py`."""

import importlib

# {name: module of Keras, KerasHub or torch}, private or slow to import. It is imported at the first
# access of the name.
SOURCE_NAMES = {
    "AutocastScope": "keras.src.backend",
    "BUILTIN_PRESETS": "keras_hub.src.utils.preset_utils",
    "BloomAttention": "keras_hub.src.models.bloom.bloom_attention",
    "GPTNeoXAttention": "keras_hub.src.models.gpt_neo_x.gpt_neo_x_attention",
    "KerasPresetLoader": "keras_hub.src.utils.preset_utils",
    "MODEL_WEIGHTS_FILE": "keras_hub.src.utils.preset_utils",
    "PresetLoader": "keras_hub.src.utils.preset_utils",
    "SHARDED_MODEL_WEIGHTS_CONFIG_FILE": "keras_hub.src.utils.preset_utils",
    "TASK_CONFIG_FILE": "keras_hub.src.utils.preset_utils",
    "TASK_WEIGHTS_FILE": "keras_hub.src.utils.preset_utils",
    "TOKENIZER_CONFIG_FILE": "keras_hub.src.utils.preset_utils",
    "TorchParallelOptimizer": "keras.src.backend.torch.optimizers.torch_parallel_optimizer",
    "T5MultiHeadAttention": "keras_hub.src.models.t5.t5_multi_head_attention",
    "_cuda_endAllocateToPool": "torch._C",
    "_cuda_releasePool": "torch._C",
    "_is_vnni_supported": "torch.cpu",
    "builtin_presets": "keras_hub.src.utils.preset_utils",
    "canonicalize_python_string_inputs": "keras_hub.src.utils.tensor_utils",
    "canonicalize_python_token_inputs": "keras_hub.src.utils.tensor_utils",
    "check_file_exists": "keras_hub.src.utils.preset_utils",
    "convert_preprocessing_outputs_python": "keras_hub.src.utils.tensor_utils",
    "find_subclass": "keras_hub.src.utils.preset_utils",
    "get_autocast_scope": "keras.src.backend",
    "get_current_remat_mode": "keras.src.backend.common.remat",
    "get_input_signature": "keras.src.export.export_utils",
    "get_keras_mask": "keras.src.backend.common.masking",
    "get_preset_loader": "keras_hub.src.utils.preset_utils",
    "global_state": "keras.src.backend.common",
    "is_remote_path": "keras.src.utils.file_utils",
    "in_stateless_scope": "keras.src.backend.common.stateless_scope",
    "in_tf_function": "keras_hub.src.utils.tensor_utils",
    "list_subclasses": "keras_hub.src.utils.preset_utils",
    "preprocessing_function": "keras_hub.src.utils.tensor_utils",
    "print_msg": "keras.src.utils.io_utils",
    "register_presets": "keras_hub.src.utils.preset_utils",
    "restore_outer_shape": "keras_hub.src.utils.tensor_utils",
}

TOKENIZER_MODULE = "keras_hub.src.tokenizers.tokenizer"
# Modules of KerasHub with a `from_preset`; `upstream.py` replaces their functions.
PRESET_MODULES = (
    "keras_hub.src.models.backbone",
    "keras_hub.src.models.preprocessor",
    "keras_hub.src.models.task",
    TOKENIZER_MODULE,
)


def __getattr__(name):
    if name not in SOURCE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_whole(SOURCE_NAMES[name]), name)


def import_whole(module):
    """Imports a module after its package, which another thread may still be importing."""
    importlib.import_module(module.partition(".")[0])
    return importlib.import_module(module)


class BackendNeutralCompileConfig:
    """Mixin for a Keras model whose compile config names optimizers by their public names.

    On torch, Keras stores `keras.src.backend.torch.optimizers.torch_adam`. Loading it imports
    torch, on any backend, which can crash after TensorFlow.
    """

    def get_compile_config(self):
        return use_public_optimizers(super().get_compile_config())  # type: ignore[misc]

    def compile_from_config(self, config):
        super().compile_from_config(use_public_optimizers(config))  # type: ignore[misc]


def use_public_optimizers(config):
    """Returns a serialized config with torch's optimizer classes replaced by the public ones.

    config: a dictionary, list or other value, in which optimizers may be nested.
    """
    if isinstance(config, (list, tuple)):
        return type(config)(map(use_public_optimizers, config))
    if not isinstance(config, dict):
        return config
    config = {name: use_public_optimizers(value) for name, value in config.items()}
    if str(config.get("module")).startswith("keras.src.backend.torch.optimizers."):
        config |= {"module": "keras.optimizers", "registered_name": None}
    return config


def installed_preset_loader(preset):
    """Returns the loader of a preset from the function that `Tokenizer.from_preset` calls."""
    return importlib.import_module(TOKENIZER_MODULE).get_preset_loader(preset)
