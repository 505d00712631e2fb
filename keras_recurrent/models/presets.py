"""`from_preset` by name, from a checkpoint, and from a directory of `save_to_preset`."""

from typing import NamedTuple

from keras_recurrent import compat, conversion
from keras_recurrent.models.overrides import check_weights_fit, split_overrides
from keras_recurrent.models.preset_loaders import (
    CheckpointLoader,
    NamedPresetLoader,
    RecurrentPresetLoader,
)


class Preset(NamedTuple):
    """What a family's table says of one name."""

    description: str
    parameters: int
    backbone: dict  # arguments of the backbone
    preprocessor: dict  # arguments of the preprocessor, but for the tokenizer
    weights: str | None = None  # where they are published, such as "hf://google/recurrentgemma-2b"


def of_sizes(sizes, label, backbone_config):
    """`{name: Preset}` of the language models in a family's table.

    Args:
        sizes: the table, `{name: size}`.
        label: a function of a size, what its models are called.
        backbone_config: a function of a size, the arguments of its backbone.
    """
    return {
        name: Preset(
            f"{label(size)} with {size.num_layers} blocks of width {size.hidden_dim} and a "
            f"vocabulary of {size.vocabulary_size:,}. {where_weights_are(size.weights)}",
            size.parameters,
            backbone_config(size),
            {"sequence_length": size.sequence_length},
            size.weights,
        )
        for name, size in sizes.items()
    }


def where_weights_are(weights=None):
    """The end of a preset's description."""
    if weights:
        return f"Weights: {weights}."
    return "Starts from fresh initialization: no weights are published."


def register(backbone_cls, presets):
    """Makes a family's presets, `{name: Preset}`, known to `from_preset` and `presets`."""
    compat.register_presets(
        {
            name: {
                "metadata": {
                    "description": preset.description,
                    "params": preset.parameters,
                    "path": backbone_cls.__name__.removesuffix("Backbone").lower(),
                }
            }
            for name, preset in presets.items()
        },
        backbone_cls,
    )
    for name, preset in presets.items():
        loader = NamedPresetLoader(
            name, backbone_cls, preset.backbone, preset.preprocessor, preset.weights
        )
        compat.serve_preset(name, loader)


def register_layout(backbone_cls, layout):
    """Lets `from_preset` read a family's checkpoints, and `export_to_transformers` write them."""
    conversion.register(backbone_cls, layout)

    def loader(preset, config):
        return CheckpointLoader(preset, config, backbone_cls, layout)

    compat.serve_checkpoints(layout.model_type, loader)


def resolve_load_weights(preset, load_weights):
    """Whether to load the weights of a preset, where None means: if there are any."""
    loader = compat.get_preset_loader(preset)
    if not isinstance(loader, RecurrentPresetLoader):
        return compat.preset_has_weights(preset) if load_weights is None else load_weights
    if load_weights is None:
        return loader.has_weights()
    if load_weights and isinstance(loader, NamedPresetLoader) and not loader.has_weights():
        raise ValueError(
            f"`load_weights=True`: {preset!r} has no published weights. Leave `load_weights` out "
            "to start from fresh initialization, or pass the directory of a model saved with "
            "`save_to_preset`."
        )
    return load_weights


def resolve_backbone_overrides(preset, kwargs):
    """Overrides with the dtype of a saved backbone, where nothing is said about it."""
    ours = isinstance(compat.get_preset_loader(preset), RecurrentPresetLoader)
    return kwargs if ours else {"dtype": compat.saved_dtype(preset), **kwargs}


def resolve_task_overrides(preset, cls, load_weights, kwargs):
    """Overrides in a form that KerasHub's `from_preset` honors: by itself it ignores some."""
    if isinstance(compat.get_preset_loader(preset), RecurrentPresetLoader):
        return kwargs  # our loaders know what to do with them
    task, backbone, preprocessor = split_overrides(preset, cls, kwargs)
    if preprocessor:
        task["preprocessor"] = cls.preprocessor_cls.from_preset(preset, **preprocessor)
    if backbone.keys() <= {"dtype"}:
        return {**task, **backbone}
    if load_weights:
        check_weights_fit(preset, backbone)
    task["backbone"] = cls.backbone_cls.from_preset(preset, load_weights=False, **backbone)
    return task
