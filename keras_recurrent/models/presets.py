"""`from_preset` by names whose sizes stand in a table; no override is ever ignored."""

import difflib
import inspect
import logging

from keras_recurrent import compat

logger = logging.getLogger("keras_recurrent")
_announced = set()


class FreshPresetLoader(compat.PresetLoader):
    """Builds the models of a name from sizes alone: no files, no weights.

    Args:
        name: string, the preset.
        backbone_cls: the class of its backbone.
        backbone_config: a dictionary of the backbone's arguments.
        preprocessor_config: a dictionary of the preprocessor's arguments, but for the tokenizer.
    """

    def __init__(self, name, backbone_cls, backbone_config, preprocessor_config):
        super().__init__(name, config={})
        self.backbone_cls = backbone_cls
        self.backbone_config = backbone_config
        self.preprocessor_config = preprocessor_config

    def check_backbone_class(self):
        return self.backbone_cls

    def load_backbone(self, cls, load_weights, **kwargs):
        check_overrides(self.preset, [cls], kwargs)
        if self.preset not in _announced:
            _announced.add(self.preset)
            logger.warning(
                "%s has no published weights: it starts from fresh initialization.", self.preset
            )
        return cls(**{**self.backbone_config, **kwargs})

    def load_tokenizer(self, cls, config_file=None, **kwargs):
        check_overrides(self.preset, [cls], kwargs)
        return cls(**kwargs)

    def load_preprocessor(self, cls, config_file=None, **kwargs):
        check_overrides(self.preset, [cls], kwargs)
        return super().load_preprocessor(cls, **{**self.preprocessor_config, **kwargs})

    def load_task(self, cls, load_weights, load_task_weights, **kwargs):
        task, backbone, preprocessor = split_overrides(self.preset, cls, kwargs)
        if "backbone" not in task:
            task["backbone"] = self.load_backbone(cls.backbone_cls, load_weights, **backbone)
        if "preprocessor" not in task:
            task["preprocessor"] = self.load_preprocessor(cls.preprocessor_cls, **preprocessor)
        return cls(**task)


def resolve_load_weights(preset, load_weights):
    """Whether to load the weights of a preset, where None means: if there are any."""
    if isinstance(compat.get_preset_loader(preset), FreshPresetLoader):
        if load_weights:
            raise ValueError(
                f"`load_weights=True`: {preset!r} has no published weights. Leave `load_weights` "
                "out to start from fresh initialization, or pass the directory of a model saved "
                "with `save_to_preset`."
            )
        return False
    return compat.preset_has_weights(preset) if load_weights is None else load_weights


def resolve_backbone_overrides(preset, kwargs):
    """Overrides with the dtype of a saved backbone, where nothing is said about it."""
    fresh = isinstance(compat.get_preset_loader(preset), FreshPresetLoader)
    return kwargs if fresh else {"dtype": compat.saved_dtype(preset), **kwargs}


def resolve_task_overrides(preset, cls, load_weights, kwargs):
    """Overrides in a form that KerasHub's `from_preset` honours: by itself it ignores some."""
    if isinstance(compat.get_preset_loader(preset), FreshPresetLoader):
        return kwargs  # that loader knows what to do with them
    task, backbone, preprocessor = split_overrides(preset, cls, kwargs)
    if preprocessor:
        task["preprocessor"] = cls.preprocessor_cls.from_preset(preset, **preprocessor)
    if backbone.keys() <= {"dtype"}:
        return {**task, **backbone}
    if load_weights:
        raise ValueError(
            f"{', '.join(map(repr, sorted(backbone)))}: the weights in {preset!r} fit only the "
            "backbone they were saved from. Pass `load_weights=False` for fresh weights in another."
        )
    task["backbone"] = cls.backbone_cls.from_preset(preset, load_weights=False, **backbone)
    return task


def split_overrides(preset, cls, kwargs):
    """Arguments for a task, its backbone and its preprocessor, each for the first that takes it."""
    classes = (cls, cls.backbone_cls, cls.preprocessor_cls)
    check_overrides(preset, classes, kwargs)
    shares = ({}, {}, {})
    for key, value in kwargs.items():
        taker = next(i for i, c in enumerate(classes) if key in _parameters(c))
        shares[taker][key] = value
    for given, share in zip(("backbone", "preprocessor"), shares[1:], strict=True):
        if given in shares[0] and share:
            raise ValueError(
                f"{', '.join(map(repr, share))}: belongs to the {given}, which is given as "
                f"`{given}=`. Say it where you make that."
            )
    return shares


def check_overrides(preset, classes, kwargs):
    """Raises for the arguments that none of `classes` takes."""
    known = [key for c in classes for key in _parameters(c)]
    for key in kwargs:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"`from_preset({preset!r})` got {key!r}, which nothing takes.{hint} Known: "
                f"{', '.join(sorted(set(known)))}"
            )


def _parameters(cls):
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
