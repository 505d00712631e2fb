"""The only file that touches `keras_hub.src`: what KerasHub 0.32 does not export but needs of us.

KerasHub finds presets by name in a closed dictionary and then loads files. `serve_preset` adds
names with a loader of their own, as KerasHub itself has for other libraries' files, for
`from_preset` of all models, tokenizers and preprocessors, KerasHub's base classes included.
"""

import difflib
import os

from keras_hub.src.models import backbone, preprocessor, task
from keras_hub.src.tokenizers import tokenizer
from keras_hub.src.utils import preset_utils
from keras_hub.src.utils.preset_utils import PresetLoader, register_presets
from keras_hub.src.utils.tensor_utils import (
    canonicalize_python_token_inputs,
    convert_preprocessing_outputs_python,
    in_tf_function,
    preprocessing_function,
)

__all__ = [
    "PresetLoader",
    "canonicalize_python_token_inputs",
    "convert_preprocessing_outputs_python",
    "get_preset_loader",
    "in_tf_function",
    "preprocessing_function",
    "preset_has_weights",
    "register_presets",
    "saved_dtype",
    "serve_preset",
]

_LOADERS = {}


def serve_preset(name, loader):
    """Lets `from_preset(name)` go through `loader`, a `PresetLoader`."""
    _LOADERS[name] = loader


def get_preset_loader(preset):
    """The loader of a name or a directory, in place of KerasHub's function of that name."""
    if preset in _LOADERS:
        return _LOADERS[preset]
    elsewhere = preset in preset_utils.BUILTIN_PRESETS or "://" in preset or os.path.exists(preset)
    near = difflib.get_close_matches(preset, _LOADERS, n=4)
    if near and not elsewhere:
        raise ValueError(
            f"Unknown preset {preset!r}: neither a name nor a directory. Near names: "
            f"{', '.join(map(repr, near))}"
        )
    return preset_utils.get_preset_loader(preset)


for module in (backbone, preprocessor, task, tokenizer):
    module.get_preset_loader = get_preset_loader


def preset_has_weights(preset):
    """Whether the directory `preset` holds the weights of a backbone."""
    files = (preset_utils.MODEL_WEIGHTS_FILE, preset_utils.SHARDED_MODEL_WEIGHTS_CONFIG_FILE)
    return any(preset_utils.check_file_exists(preset, file) for file in files)


def saved_dtype(preset):
    """The dtype of the models in the directory `preset`: as saved if quantized, else Keras's own.

    KerasHub looks it up for tasks, but not for backbones, which then cannot take in int8 weights.
    """
    loader = get_preset_loader(preset)
    return loader._resolve_dtype(loader.config, {})
