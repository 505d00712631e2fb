"""Hooks that make this package's presets available in KerasHub's `from_preset`.

KerasHub finds presets by name in a closed dictionary and then loads files. Its `get_preset_loader`
is replaced by one that also knows this package's names and checkpoints, for `from_preset` of all
models, tokenizers and preprocessors, including KerasHub's base classes. Preprocessors and
tokenizers are looked up by the class of the backbone. A backbone that takes the same inputs as a
backbone of KerasHub names that class in its attribute `preprocessed_as`.
"""

from keras_recurrent import compat
from keras_recurrent.checkpoints.loading import find_class, get_loader


def install():
    """Replaces functions of KerasHub by those of this package."""
    modules = compat.PRESET_MODULES
    compat.replace_names(modules["backbone"], get_preset_loader=get_loader)
    compat.replace_names(modules["task"], get_preset_loader=get_loader, find_subclass=find_class)
    for name in ("preprocessor", "tokenizer"):
        compat.replace_names(
            modules[name], get_preset_loader=get_loader, find_subclass=_find_preprocessing_class
        )


def _find_preprocessing_class(preset, cls, backbone_cls):
    backbone_cls = getattr(backbone_cls, "preprocessed_as", backbone_cls)
    if cls.backbone_cls is backbone_cls:
        return cls
    return find_class(preset, cls, backbone_cls)
