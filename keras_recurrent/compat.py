"""The private names of Keras and KerasHub that are used, and the hooks for presets in KerasHub.

The tables below have them all, and a test compares them with the code.

KerasHub finds presets by name in a closed dictionary and then loads files. Its `get_preset_loader`
is replaced here by one that also knows this package's names and checkpoints, for `from_preset` of
all models, tokenizers and preprocessors, KerasHub's base classes included. Preprocessors and
tokenizers are looked up by the class of the backbone. A backbone that differs from one of
KerasHub's only inside the model names that class in its attribute `preprocessed_as`.
"""

import functools
import importlib
from typing import Any

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


def _get_preset_loader(preset):
    from keras_recurrent.checkpoints import loading  # only when asked for: it reads files

    return loading.get_loader(preset)


def find_class(preset, cls, backbone_cls):
    """The class, of those that are built on `cls`, for the backbone of a preset.

    Raises:
        ValueError: there is none; names the classes that do take the backbone.
    """
    root = next(c for c in cls.__mro__ if c.__module__ in REPLACED_NAMES)
    fitting = [c for c in __getattr__("list_subclasses")(root) if c.backbone_cls == backbone_cls]
    if not any(issubclass(c, cls) for c in fitting):
        # A language model rather than a classifier, if that is what was asked for.
        kind = next(c for c in cls.__mro__ if c.__module__.startswith("keras_hub."))
        fitting = [c for c in fitting if issubclass(c, kind)] or fitting
        names = sorted({f"`{c.__name__}`" for c in fitting}) or [f"`{backbone_cls.__name__}`"]
        raise ValueError(
            f"{_name_of(preset)!r} is no preset of `{cls.__name__}`: its network is a "
            f"`{backbone_cls.__name__}`. Call `from_preset` of {' or '.join(names)} instead."
        )
    return __getattr__("find_subclass")(_name_of(preset), cls, backbone_cls)


def _find_preprocessing_class(preset, cls, backbone_cls):
    backbone_cls = getattr(backbone_cls, "preprocessed_as", backbone_cls)
    if cls.backbone_cls is backbone_cls:
        return cls
    return find_class(preset, cls, backbone_cls)


def _name_of(preset):
    """For errors. KerasHub's `from_preset` gets a loader where the loader is known already."""
    return getattr(preset, "preset", preset)


# What is replaced in the modules of KerasHub that have a `from_preset`.
REPLACED_NAMES: dict[str, dict[str, Any]] = {
    "keras_hub.src.models.backbone": {"get_preset_loader": _get_preset_loader},
    "keras_hub.src.models.preprocessor": {
        "get_preset_loader": _get_preset_loader,
        "find_subclass": _find_preprocessing_class,
    },
    "keras_hub.src.models.task": {
        "get_preset_loader": _get_preset_loader,
        "find_subclass": find_class,
    },
    "keras_hub.src.tokenizers.tokenizer": {
        "get_preset_loader": _get_preset_loader,
        "find_subclass": _find_preprocessing_class,
    },
}


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


for _module, _replacements in REPLACED_NAMES.items():
    for _name, _replacement in _replacements.items():
        setattr(importlib.import_module(_module), _name, _replacement)
