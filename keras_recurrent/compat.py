"""The only file that touches `keras_hub.src`: what KerasHub 0.32 does not export but needs of us.

KerasHub finds presets by name in a closed dictionary and then loads files. `serve_preset` adds
names with a loader of their own, as KerasHub itself has for other libraries' files, and
`serve_checkpoints` the `config.json` files of a `model_type`, for `from_preset` of all models,
tokenizers and preprocessors, KerasHub's base classes included. Preprocessors and tokenizers are
looked up by the class of the backbone: one that changes nothing before the model says as what other
class it is served, in `preprocessed_as`.
"""

import difflib
import os

from keras_hub.src.models import backbone, preprocessor, task
from keras_hub.src.models.bloom.bloom_attention import BloomAttention
from keras_hub.src.models.gpt_neo_x.gpt_neo_x_attention import GPTNeoXAttention
from keras_hub.src.models.t5.t5_multi_head_attention import T5MultiHeadAttention
from keras_hub.src.tokenizers import tokenizer
from keras_hub.src.utils import preset_utils
from keras_hub.src.utils.preset_utils import PresetLoader, register_presets
from keras_hub.src.utils.tensor_utils import (
    canonicalize_python_token_inputs,
    convert_preprocessing_outputs_python,
    in_tf_function,
    preprocessing_function,
)

from keras_recurrent.conversion import files

__all__ = [
    "BloomAttention",
    "GPTNeoXAttention",
    "PresetLoader",
    "T5MultiHeadAttention",
    "canonicalize_python_token_inputs",
    "convert_preprocessing_outputs_python",
    "find_preprocessing_class",
    "get_preset_loader",
    "in_tf_function",
    "preprocessing_function",
    "preset_has_weights",
    "register_presets",
    "saved_dtype",
    "serve_checkpoints",
    "serve_preset",
]

_LOADERS = {}
_CHECKPOINT_LOADERS = {}


def serve_preset(name, loader):
    """Lets `from_preset(name)` go through `loader`, a `PresetLoader`."""
    _LOADERS[name] = loader


def serve_checkpoints(model_type, make_loader):
    """Lets `from_preset` go through `make_loader(preset, config)` where `config.json` says so."""
    _CHECKPOINT_LOADERS[model_type] = make_loader


def get_preset_loader(preset):
    """The loader of a name or a directory, in place of KerasHub's function of that name."""
    if not isinstance(preset, str):
        raise ValueError(
            "`preset` must be a string: a name, a directory or 'hf://owner/repository'; got "
            f"{preset!r}. A path goes in as `str(path)`."
        )
    if preset in _LOADERS:
        return _LOADERS[preset]
    elsewhere = preset in preset_utils.BUILTIN_PRESETS or "://" in preset or os.path.exists(preset)
    near = difflib.get_close_matches(preset, _LOADERS, n=4)
    if near and not elsewhere:
        raise ValueError(
            f"Unknown preset {preset!r}: neither a name nor a directory. Near names: "
            f"{', '.join(map(repr, near))}"
        )
    if preset.startswith(files.HUB) or os.path.isdir(preset):
        config = files.read_json(preset, files.CONFIG_FILE) if _has_config(preset) else {}
        if config.get("model_type") in _CHECKPOINT_LOADERS:
            return _CHECKPOINT_LOADERS[config["model_type"]](preset, config)
    return preset_utils.get_preset_loader(preset)


def _has_config(preset):
    return files.exists(preset, files.CONFIG_FILE)


for module in (backbone, preprocessor, task, tokenizer):
    module.get_preset_loader = get_preset_loader


def find_preprocessing_class(preset, cls, backbone_cls):
    """The subclass of `cls` for a backbone, in place of KerasHub's `find_subclass`."""
    backbone_cls = getattr(backbone_cls, "preprocessed_as", backbone_cls)
    if cls.backbone_cls is backbone_cls:
        return cls
    return preset_utils.find_subclass(preset, cls, backbone_cls)


for module in (preprocessor, tokenizer):
    module.find_subclass = find_preprocessing_class


def preset_has_weights(preset):
    """Whether the directory `preset` holds the weights of a backbone."""
    names = (preset_utils.MODEL_WEIGHTS_FILE, preset_utils.SHARDED_MODEL_WEIGHTS_CONFIG_FILE)
    return any(preset_utils.check_file_exists(preset, name) for name in names)


def saved_dtype(preset):
    """The dtype of the models in the directory `preset`: as saved if quantized, else Keras's own.

    KerasHub looks it up for tasks, but not for backbones, which then cannot take in int8 weights.
    """
    loader = get_preset_loader(preset)
    return loader._resolve_dtype(loader.config, {})
