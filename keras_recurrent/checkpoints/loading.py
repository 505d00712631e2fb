"""`from_preset` by name, from a checkpoint, and from a directory of `save_to_preset`.

A model's `from_preset` asks here for the loader and for arguments that KerasHub honors, and hands
both to KerasHub's `from_preset`, which takes a loader in place of a preset's name.
"""

import difflib
import os

import keras
import keras_hub

from keras_recurrent import compat
from keras_recurrent.checkpoints import files, layout, names
from keras_recurrent.checkpoints.loaders import (
    CheckpointLoader,
    NamedPresetLoader,
    RecurrentPresetLoader,
    SavedPresetLoader,
)
from keras_recurrent.checkpoints.messages import shown
from keras_recurrent.checkpoints.overrides import (
    check_overrides,
    check_weights_fit,
    split_overrides,
)
from keras_recurrent.checks.arguments import check_boolean
from keras_recurrent.gqa import placeholders

HINT = (
    "`presets` of a model's class lists its names; a model on the Hugging Face Hub is "
    "'hf://owner/repository'."
)
FRESH = "`load_weights=False` makes a model of its sizes with fresh weights."


def get_loader(preset):
    """The loader of a name, a directory or a repository; a loader is its own.

    Raises:
        ValueError: `preset` is no string, or neither a known name nor a directory; all that
            KerasHub raises where a preset is not of this package.
    """
    if isinstance(preset, compat.PresetLoader):
        return preset
    if not isinstance(preset, str):
        raise ValueError(
            "`preset` must be a string: a name, a directory or 'hf://owner/repository'; got "
            f"{preset!r}. A path goes in as `str(path)`."
        )
    if preset in names.PRESETS:
        backbone_cls, row = names.PRESETS[preset]
        return NamedPresetLoader(preset, backbone_cls, row, get_loader)
    elsewhere = preset in compat.BUILTIN_PRESETS or "://" in preset or os.path.exists(preset)
    if not elsewhere:
        near = difflib.get_close_matches(preset, names.PRESETS, n=4)
        hint = f"Near names: {', '.join(map(repr, near))}" if near else HINT
        raise ValueError(
            f"Unknown preset {preset!r}: neither a name nor a directory, of which there is no "
            f"{os.path.abspath(preset)!r}. {hint}"
        )
    if preset.startswith(files.HUB) or os.path.isdir(preset):
        return _loader_of_files(preset)
    return compat.get_preset_loader(preset)


def _loader_of_files(preset):
    preset_files = files.PresetFiles(preset)
    if not preset_files.exists(files.CONFIG_FILE):
        return compat.get_preset_loader(preset)  # which raises
    config = preset_files.read_json(files.CONFIG_FILE)
    for key in ("model_type", "registered_name"):
        if not isinstance(config.get(key, ""), str):
            raise ValueError(
                f"{key!r} is {shown(config[key])} in {files.CONFIG_FILE} of {preset!r}; it must be "
                "a string."
            )
    found = layout.of_model_type(config.get("model_type"))
    if found is not None:
        return CheckpointLoader(preset_files, config, *found)
    if "registered_name" in config:
        # A class of ours that was not imported yet is only known to Keras by its name.
        placeholders.import_class(config["registered_name"])
        if not isinstance(config.get("config"), dict):
            raise ValueError(f"{files.CONFIG_FILE} of {preset!r} has no 'config' of its class.")
        return SavedPresetLoader(preset, config)
    try:
        return compat.get_preset_loader(preset)
    except ValueError as error:
        raise ValueError(
            f"{files.CONFIG_FILE} of {preset!r} is of no model that is known: {error}"
        ) from error


def find_class(preset, cls, backbone_cls):
    """The class, of those that are built on `cls`, for the backbone of a preset.

    Raises:
        ValueError: there is none; names the classes that do take the backbone.
    """
    root = next(c for c in cls.__mro__ if c.__module__ in compat.PRESET_MODULES.values())
    fitting = [c for c in compat.list_subclasses(root) if c.backbone_cls == backbone_cls]
    if not any(issubclass(c, cls) for c in fitting):
        # A language model rather than a classifier, if that is what was asked for.
        kind = next(c for c in cls.__mro__ if c.__module__.startswith("keras_hub."))
        fitting = [c for c in fitting if issubclass(c, kind)] or fitting
        names = sorted({f"`{c.__name__}`" for c in fitting}) or [f"`{backbone_cls.__name__}`"]
        raise ValueError(
            f"{_name_of(preset)!r} is no preset of `{cls.__name__}`: its network is a "
            f"`{backbone_cls.__name__}`. Call `from_preset` of {' or '.join(names)} instead."
        )
    return compat.find_subclass(_name_of(preset), cls, backbone_cls)


def _name_of(preset):
    """For errors. KerasHub's `from_preset` gets a loader where the loader is known already."""
    return getattr(preset, "preset", preset)


def resolve_task(cls, preset, load_weights, overrides):
    """`(loader, load_weights, overrides)` for KerasHub's `from_preset` of a task.

    KerasHub by itself ignores some overrides.

    Args:
        cls: the class of the task.
        preset: string, or a loader.
        load_weights: boolean; None: if any belong to the preset.
        overrides: dictionary of what the task, its backbone and its preprocessor take.
    """
    loader = get_loader(preset)
    backbone_cls = loader.check_backbone_class()
    if cls.backbone_cls != backbone_cls:
        find_class(preset, cls, backbone_cls)  # raises where there is none
    load_weights = _resolve_load_weights(loader, load_weights)
    if load_weights and "num_classes" not in overrides:
        _check_weights_of_head(loader, cls)
    if isinstance(loader, RecurrentPresetLoader):
        return loader, load_weights, overrides  # it honors them all
    reads_text = issubclass(cls, (keras_hub.models.CausalLM, keras_hub.models.TextClassifier))
    if reads_text and not overrides.keys() & {"preprocessor", "tokenizer"}:
        _check_tokenizer(loader.preset, cls)
    task, backbone, preprocessor = split_overrides(loader.preset, cls, overrides)
    if preprocessor:
        task["preprocessor"] = cls.preprocessor_cls.from_preset(loader, **preprocessor)
    if backbone.keys() <= {"dtype"}:
        return loader, load_weights, {**task, **backbone}
    if load_weights:
        check_weights_fit(loader.preset, backbone)
    task["backbone"] = cls.backbone_cls.from_preset(loader, load_weights=False, **backbone)
    return loader, load_weights, task


def resolve_backbone(cls, preset, load_weights, overrides):
    """`(loader, load_weights, overrides)` for KerasHub's `from_preset` of a backbone."""
    loader = get_loader(preset)
    check_overrides(loader.preset, [cls], overrides)
    load_weights = _resolve_load_weights(loader, load_weights)
    if isinstance(loader, compat.KerasPresetLoader):
        # KerasHub looks up the saved dtype for tasks, but not for backbones, which then cannot
        # load int8 weights.
        overrides = {"dtype": loader._resolve_dtype(loader.config, {}), **overrides}
    return loader, load_weights, overrides


def _resolve_load_weights(loader, load_weights):
    """Whether to load the weights, where None means: if any belong to the preset."""
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
    """Raises where a preset that KerasHub saved lacks the weights of its backbone."""
    weights = (compat.MODEL_WEIGHTS_FILE, compat.SHARDED_MODEL_WEIGHTS_CONFIG_FILE)
    if not any(compat.check_file_exists(preset, name) for name in weights):
        raise FileNotFoundError(
            f"There is neither {weights[0]} nor {weights[1]} in {preset!r}, which `save_to_preset` "
            f"writes. {FRESH}"
        )


def _check_tokenizer(preset, cls):
    """Raises where a preset that KerasHub saved is a backbone alone."""
    parts = (compat.TASK_CONFIG_FILE, compat.TOKENIZER_CONFIG_FILE)
    if not any(compat.check_file_exists(preset, name) for name in parts):
        raise FileNotFoundError(
            f"There is neither {parts[0]} nor {parts[1]} in {preset!r}, which holds a backbone "
            f"alone. `{cls.backbone_cls.__name__}.from_preset` loads it; `preprocessor=None` makes "
            "a model of it that takes tokens, and `preprocessor=` one of strings."
        )


def _check_weights_of_head(loader, cls):
    """Raises where a classifier that KerasHub saved lacks the weights beside its backbone."""
    if not issubclass(cls, (keras_hub.models.ImageClassifier, keras_hub.models.TextClassifier)):
        return  # language models have none
    saved = isinstance(loader, compat.KerasPresetLoader) and _is_of_task(loader.preset, cls)
    if saved and not compat.check_file_exists(loader.preset, compat.TASK_WEIGHTS_FILE):
        raise FileNotFoundError(
            f"There is no {compat.TASK_WEIGHTS_FILE} in {loader.preset!r}, the weights of the "
            f"classes. `num_classes=` makes fresh ones. {FRESH}"
        )


def _is_of_task(preset, cls):
    """Whether a preset that KerasHub saved holds a model of a class, and not of another task."""
    if not compat.check_file_exists(preset, compat.TASK_CONFIG_FILE):
        return False
    config = files.PresetFiles(preset).read_json(compat.TASK_CONFIG_FILE)
    saved = keras.saving.get_registered_object(config.get("registered_name"))
    return isinstance(saved, type) and issubclass(saved, cls)
