"""Loader selection for `from_preset`: a name, a checkpoint, or a directory of `save_to_preset`.

A model's `from_preset` gets from this file the loader and the arguments that KerasHub honors. It
passes both to KerasHub's `from_preset`, which takes a loader in place of a preset's name.
"""

import difflib
import os

import keras
import keras_hub

from keras_recurrent import compat
from keras_recurrent.atomic_files import find_folder
from keras_recurrent.checkpoints import files, layout, names
from keras_recurrent.checkpoints.loaders import (
    CheckpointLoader,
    NamedPresetLoader,
    RecurrentPresetLoader,
    SavedPresetLoader,
)
from keras_recurrent.checkpoints.messages import short_repr
from keras_recurrent.checkpoints.overrides import (
    check_overrides,
    check_weights_fit,
    split_overrides,
)
from keras_recurrent.checks.arguments import check_boolean

HINT = (
    "`presets` of a model's class lists its names; a model on the Hugging Face Hub is "
    "'hf://owner/repository'."
)
FRESH = "`load_weights=False` makes a model of its sizes with fresh weights."


def get_loader(preset):
    """Returns the loader of a name, a directory or a repository. Returns a loader unchanged.

    Raises:
        ValueError: `preset` is not a string, or neither a known name nor a directory; and the
            errors of KerasHub for presets of other packages.
    """
    if isinstance(preset, compat.PresetLoader):
        return preset
    if not isinstance(preset, str):
        raise ValueError(
            "`preset` must be a string: a name, a directory or 'hf://owner/repository'; got "
            f"{preset!r}. Pass a path as `str(path)`."
        )
    if preset in names.PRESETS:
        backbone_cls, row = names.PRESETS[preset]
        return NamedPresetLoader(preset, backbone_cls, row, get_loader)
    preset = find_folder(preset)
    is_external = preset in compat.BUILTIN_PRESETS or "://" in preset or os.path.exists(preset)
    if not is_external:
        near = difflib.get_close_matches(preset, names.PRESETS, n=4)
        hint = f"Near names: {', '.join(map(repr, near))}" if near else HINT
        raise ValueError(
            f"Unknown preset {preset!r}: neither a name nor a directory, of which there is no "
            f"{os.path.abspath(preset)!r}. {hint}"
        )
    if preset.startswith(files.HUB) or os.path.isdir(preset):
        return _get_file_loader(preset)
    return compat.get_preset_loader(preset)


def _get_file_loader(preset):
    preset_files = files.PresetFiles(preset)
    if not preset_files.exists(files.CONFIG_FILE):
        return compat.get_preset_loader(preset)  # raises KerasHub's error
    config = preset_files.read_json(files.CONFIG_FILE)
    for key in ("model_type", "registered_name"):
        if not isinstance(config.get(key, ""), str):
            raise ValueError(
                f"{key!r} is {short_repr(config[key])} in {files.CONFIG_FILE} of {preset!r}; it "
                "must be a string."
            )
    found = layout.find_layout(config.get("model_type"))
    if found is not None:
        return CheckpointLoader(preset_files, config, *found)
    if "registered_name" in config:
        if not isinstance(config.get("config"), dict):
            raise ValueError(f"{files.CONFIG_FILE} of {preset!r} has no 'config' of its class.")
        return SavedPresetLoader(preset, config)
    try:
        return compat.get_preset_loader(preset)
    except ValueError as error:
        raise ValueError(
            f"{files.CONFIG_FILE} of {preset!r} is of an unknown model: {error}"
        ) from error


def find_class(preset, cls, backbone_cls):
    """Returns the subclass of `cls` for the backbone of a preset.

    Raises:
        ValueError: there is none; the message names the classes that take the backbone.
    """
    root = next(c for c in cls.__mro__ if c.__module__ in compat.PRESET_MODULES)
    fitting = [c for c in compat.list_subclasses(root) if c.backbone_cls == backbone_cls]
    if not any(issubclass(c, cls) for c in fitting):
        # Name language models for a language model, and classifiers for a classifier.
        kind = next(c for c in cls.__mro__ if c.__module__.startswith("keras_hub."))
        fitting = [c for c in fitting if issubclass(c, kind)] or fitting
        names = sorted({f"`{c.__name__}`" for c in fitting}) or [f"`{backbone_cls.__name__}`"]
        raise ValueError(
            f"{_preset_name(preset)!r} is no preset of `{cls.__name__}`: its network is a "
            f"`{backbone_cls.__name__}`. Call `from_preset` of {' or '.join(names)} instead."
        )
    return compat.find_subclass(_preset_name(preset), cls, backbone_cls)


def find_subclass(preset, cls, backbone_cls):
    """Returns the subclass of `cls` for a preset, in place of KerasHub's function.

    Preprocessors and tokenizers are looked up by the class of the backbone. A backbone that takes
    the same inputs as a backbone of KerasHub names that class in its attribute `preprocessed_as`.
    """
    if not issubclass(cls, keras_hub.models.Task):
        backbone_cls = getattr(backbone_cls, "preprocessed_as", backbone_cls)
        if cls.backbone_cls is backbone_cls:
            return cls
    return find_class(preset, cls, backbone_cls)


def _preset_name(preset):
    """Returns a preset's name for error messages. `preset` may be a loader."""
    return getattr(preset, "preset", preset)


def resolve_task(cls, preset, load_weights, overrides):
    """Returns `(loader, load_weights, overrides)` for KerasHub's `from_preset` of a task.

    Overrides that KerasHub would ignore are applied here.

    Args:
        cls: the class of the task.
        preset: string, or a loader.
        load_weights: boolean. None: True if the preset has weights.
        overrides: dictionary of arguments of the task, its backbone and its preprocessor.
    """
    loader = get_loader(preset)
    backbone_cls = loader.check_backbone_class()
    if cls.backbone_cls != backbone_cls:
        find_class(preset, cls, backbone_cls)  # raises an error if there is none
    load_weights = _resolve_load_weights(loader, load_weights)
    if load_weights and "num_classes" not in overrides:
        _check_weights_of_head(loader, cls)
    if isinstance(loader, RecurrentPresetLoader):
        return loader, load_weights, overrides  # our loaders honor all overrides
    reads_text = issubclass(cls, (keras_hub.models.CausalLM, keras_hub.models.TextClassifier))
    if reads_text and not overrides.keys() & {"preprocessor", "tokenizer"}:
        _check_tokenizer(loader.preset, cls)
    task, backbone, preprocessor = split_overrides(loader.preset, cls, overrides)
    if preprocessor:
        task["preprocessor"] = cls.preprocessor_cls.from_preset(loader, **preprocessor)
    if backbone.keys() <= {"dtype"}:
        return loader, load_weights, {**task, **backbone}
    if load_weights:
        check_weights_fit(loader.preset, cls.backbone_cls, backbone)
    task["backbone"] = cls.backbone_cls.from_preset(loader, load_weights=False, **backbone)
    return loader, load_weights, task


def resolve_backbone(cls, preset, load_weights, overrides):
    """Returns `(loader, load_weights, overrides)` for KerasHub's `from_preset` of a backbone."""
    loader = get_loader(preset)
    check_overrides(loader.preset, [cls], overrides)
    load_weights = _resolve_load_weights(loader, load_weights)
    if isinstance(loader, compat.KerasPresetLoader):
        # KerasHub restores the saved dtype of tasks but not of backbones, which without it cannot
        # load int8 weights.
        overrides = {"dtype": loader._resolve_dtype(loader.config, {}), **overrides}
    return loader, load_weights, overrides


def _resolve_load_weights(loader, load_weights):
    """Returns True if weights are to be loaded. None means: if the preset has any."""
    if load_weights is not None:
        check_boolean("load_weights", load_weights)
    else:
        # `save_to_preset` always writes them.
        load_weights = not isinstance(loader, RecurrentPresetLoader) or loader.has_weights()
    if load_weights and isinstance(loader, compat.KerasPresetLoader):
        _check_keras_weights(loader.preset)
    if load_weights and isinstance(loader, NamedPresetLoader) and not loader.has_weights():
        raise ValueError(
            f"`load_weights=True`: {loader.preset!r} has no published weights. Leave "
            "`load_weights` out to start from fresh initialization, or pass the directory of a "
            "model saved with `save_to_preset`."
        )
    return load_weights


def _check_keras_weights(preset):
    """Raises an error if a preset that KerasHub saved lacks the weights of its backbone."""
    weights = (compat.MODEL_WEIGHTS_FILE, compat.SHARDED_MODEL_WEIGHTS_CONFIG_FILE)
    if not any(compat.check_file_exists(preset, name) for name in weights):
        raise FileNotFoundError(
            f"There is neither {weights[0]} nor {weights[1]} in {preset!r}; `save_to_preset` "
            f"writes one of them. {FRESH}"
        )


def _check_tokenizer(preset, cls):
    """Raises an error if a preset that KerasHub saved is a backbone without a tokenizer."""
    parts = (compat.TASK_CONFIG_FILE, compat.TOKENIZER_CONFIG_FILE)
    if not any(compat.check_file_exists(preset, name) for name in parts):
        raise FileNotFoundError(
            f"There is neither {parts[0]} nor {parts[1]} in {preset!r}, which holds only a "
            f"backbone. `{cls.backbone_cls.__name__}.from_preset` loads it. For a model that takes "
            "tokens, pass `preprocessor=None`; for one that takes strings, pass a preprocessor."
        )


def _check_weights_of_head(loader, cls):
    """Raises an error if a classifier that KerasHub saved lacks the weights of its head."""
    if not issubclass(cls, (keras_hub.models.ImageClassifier, keras_hub.models.TextClassifier)):
        return  # language models have no weights in addition to the backbone's
    saved = isinstance(loader, compat.KerasPresetLoader) and _is_saved_task(loader.preset, cls)
    if saved and not compat.check_file_exists(loader.preset, compat.TASK_WEIGHTS_FILE):
        raise FileNotFoundError(
            f"There is no {compat.TASK_WEIGHTS_FILE} in {loader.preset!r}, which holds the weights "
            f"of the classes. `num_classes=` makes fresh ones. {FRESH}"
        )


def _is_saved_task(preset, cls):
    """Returns True if a preset that KerasHub saved holds a model of the class `cls`."""
    if not compat.check_file_exists(preset, compat.TASK_CONFIG_FILE):
        return False
    config = files.PresetFiles(preset).read_json(compat.TASK_CONFIG_FILE)
    saved = keras.saving.get_registered_object(config.get("registered_name"))
    return isinstance(saved, type) and issubclass(saved, cls)
