"""The private names of Keras and KerasHub that are used.

The tables below have them all, and a test compares them with the code.
"""

import functools
import importlib

# Names of modules inside KerasHub and Keras, each imported when a name of it is first asked for.
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
    "T5MultiHeadAttention": "keras_hub.src.models.t5.t5_multi_head_attention",
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
    "in_tf_function": "keras_hub.src.utils.tensor_utils",
    "list_subclasses": "keras_hub.src.utils.preset_utils",
    "preprocessing_function": "keras_hub.src.utils.tensor_utils",
    "print_msg": "keras.src.utils.io_utils",
    "register_presets": "keras_hub.src.utils.preset_utils",
}

# Modules of KerasHub with a `from_preset`, whose functions `checkpoints/hub_hooks.py` replaces.
PRESET_MODULES = {
    "backbone": "keras_hub.src.models.backbone",
    "preprocessor": "keras_hub.src.models.preprocessor",
    "task": "keras_hub.src.models.task",
    "tokenizer": "keras_hub.src.tokenizers.tokenizer",
}

# Private attributes and methods that are read, called or overridden, and the classes that have
# them. TorchLayer is part of `keras.Layer` where Keras runs on torch.
PRIVATE_ATTRIBUTES = {
    # Layers
    "_flatten_layers": ("keras.Layer",),
    "_layers": ("keras.Layer",),
    "_non_trainable_variables": ("keras.Layer",),
    "_remat_mode": ("keras.Layer",),
    "_torch_params": ("keras.src.backend.torch.layer.TorchLayer",),
    "_track_variables": ("keras.src.backend.torch.layer.TorchLayer",),
    "_tracker": ("keras.Layer",),
    "_trainable_variables": ("keras.Layer",),
    # Preprocessing
    "_generate_preprocess_python": ("keras_hub.models.CausalLMPreprocessor",),
    "_value": ("keras.Variable",),
    # Training
    "_aggregate_additional_loss": ("keras.Model",),
    "_compile_metrics": ("keras.Model",),
    "_distribute_strategy": ("keras.src.backend.tensorflow.trainer.TensorFlowTrainer",),
    "_initial_epoch": ("keras.Model",),
    "_maybe_symbolic_build": ("keras.src.backend.tensorflow.trainer.TensorFlowTrainer",),
    "_symbolic_build": ("keras.Model",),
    # Graphs
    "_inbound_nodes": ("keras.Operation",),
    "_keras_history": ("keras.src.ops.node.Node",),
    "_nodes_by_depth": ("keras.src.ops.function.Function",),
    # Attention
    "_build_attention": ("keras.layers.MultiHeadAttention",),
    "_compute_attention": ("keras.layers.MultiHeadAttention",),
    "_cross_attention_layer": ("keras_hub.layers.TransformerDecoder",),
    "_flash_attention": ("keras.layers.MultiHeadAttention", "keras.layers.GroupQueryAttention"),
    "_get_common_kwargs_for_sublayer": ("keras.layers.MultiHeadAttention",),
    "_key_dense": ("keras.layers.MultiHeadAttention", "keras.layers.GroupQueryAttention"),
    "_output_dense": (
        "keras.layers.MultiHeadAttention",
        "keras_hub.src.models.bloom.bloom_attention.BloomAttention",
        "keras_hub.src.models.gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention",
    ),
    "_output_shape": ("keras.layers.MultiHeadAttention",),
    "_qkv_dense": ("keras_hub.src.models.gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention",),
    "_query_dense": (
        "keras.layers.MultiHeadAttention",
        "keras.layers.GroupQueryAttention",
        "keras_hub.src.models.bloom.bloom_attention.BloomAttention",
    ),
    "_self_attention_layer": (
        "keras_hub.layers.TransformerDecoder",
        "keras_hub.src.models.bloom.bloom_decoder.BloomDecoder",
        "keras_hub.src.models.gpt_neo_x.gpt_neo_x_decoder.GPTNeoXDecoder",
    ),
    "_value_dense": ("keras.layers.MultiHeadAttention", "keras.layers.GroupQueryAttention"),
    # Quantized weights
    "_int4_block_size": ("keras.layers.Dense",),
    "_kernel": ("keras.layers.Dense",),
    # Low-rank weights
    "_lora_enabled_layers": ("keras_hub.models.Backbone",),
    # Generation
    "_build_cache": (
        "keras_hub.models.BloomCausalLM",
        "keras_hub.models.GPT2CausalLM",
        "keras_hub.models.GPTNeoXCausalLM",
        "keras_hub.models.OPTCausalLM",
    ),
    "_initialize_cache": ("keras_hub.models.BartSeq2SeqLM", "keras_hub.models.T5Seq2SeqLM"),
    # Tokenizers
    "_add_special_token": ("keras_hub.tokenizers.Tokenizer",),
    "_canonicalize_detokenize_spm_inputs": ("keras_hub.tokenizers.SentencePieceTokenizer",),
    "_detokenize_python": ("keras_hub.tokenizers.ByteTokenizer",),
    "_detokenize_tf": (
        "keras_hub.tokenizers.ByteTokenizer",
        "keras_hub.tokenizers.SentencePieceTokenizer",
    ),
    "_sentence_piece_spm": ("keras_hub.tokenizers.SentencePieceTokenizer",),
    "_special_token_attrs": ("keras_hub.tokenizers.Tokenizer",),
    "_tokenize_tf": ("keras_hub.tokenizers.ByteTokenizer",),
    "_unk_token_id": ("keras_hub.tokenizers.SentencePieceTokenizer",),
    "_update_special_token_ids": ("keras_hub.tokenizers.Tokenizer",),
    # Presets
    "_resolve_dtype": ("keras_hub.src.utils.preset_utils.KerasPresetLoader",),
}


def __getattr__(name):
    if name not in SOURCE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(SOURCE_NAMES[name]), name)


def replace_names(module, **replacements):
    """Puts other functions in the place of those that a module of KerasHub has by these names."""
    for name, replacement in replacements.items():
        setattr(importlib.import_module(module), name, replacement)


def installed_preset_loader(preset):
    """The loader of a preset, by the function that `from_preset` of a tokenizer calls."""
    return importlib.import_module(PRESET_MODULES["tokenizer"]).get_preset_loader(preset)


def replace_exporter(name, make):
    """Replaces a function of Keras that `model.export` calls, by what `make` makes of it."""
    module = importlib.import_module("keras.src.export")
    setattr(module, name, make(getattr(module, name)))


def check_before_calls(cls, check):
    """Has `check(layer, args, kwargs)` called before each call of a layer of Keras's own class."""
    original = cls.__call__

    @functools.wraps(original)
    def call(self, *args, **kwargs):
        check(self, args, kwargs)
        return original(self, *args, **kwargs)

    cls.__call__ = call
