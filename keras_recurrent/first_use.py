"""Imports of the language models, and of KerasHub, when they are first used.

KerasHub imports TensorFlow, which takes seconds. Layers need neither of them. With these hooks,
`import keras_recurrent` is enough to load a saved model, and for KerasHub to find the presets of
this package.
"""

import functools
import importlib
import importlib.abc
import sys

from keras_recurrent import compat

HUB = "keras_hub"
LOADING = "keras_recurrent.checkpoints.loading"
MODELS = "keras_recurrent.models"
PREFIX = "keras_recurrent>"  # begins the names of registered classes
# Modules that register classes and are not imported by `import keras_recurrent`.
REGISTERING_MODULES = ("keras_recurrent.gqa.uptraining", MODELS, "keras_recurrent.gqa.convert")


def install():
    """Installs hooks in Keras, and in KerasHub, imported before or after this package."""
    for module in compat.REGISTRY_MODULES:
        compat.replace_function(module, "get_registered_object", _import_before_lookup)
    sys.meta_path.insert(0, _HubFinder())
    if sys.modules.get(HUB):
        _replace_hub_functions()


def _import_before_lookup(get_registered_object):
    """Returns a function that imports the modules of registered classes that are unknown so far."""

    @functools.wraps(get_registered_object)
    def call(name, *args, **kwargs):
        found = get_registered_object(name, *args, **kwargs)
        for module in REGISTERING_MODULES if str(name).startswith(PREFIX) else ():
            if found is None:
                importlib.import_module(module)
                found = get_registered_object(name, *args, **kwargs)
        return found

    return call


class _HubFinder(importlib.abc.MetaPathFinder):
    """Finds KerasHub, and replaces its functions each time it is imported."""

    def find_spec(self, fullname, path, target=None):
        if fullname != HUB:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _HubLoader(spec.loader)
        return spec


class _HubLoader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader  # it also finds data files
        self._loader.exec_module(module)
        _replace_hub_functions()


def _replace_hub_functions():
    # This function runs while KerasHub is being imported, maybe by a module that the models need.
    # So the models are imported when one of the replacements is first called.
    for module in compat.PRESET_MODULES.values():
        compat.replace_names(
            module,
            builtin_presets=_builtin_presets,
            find_subclass=_find_subclass,
            get_preset_loader=_get_preset_loader,
        )


def _builtin_presets(cls):
    importlib.import_module(MODELS)
    return compat.builtin_presets(cls)


def _find_subclass(preset, cls, backbone_cls):
    return _loading().find_subclass(preset, cls, backbone_cls)


def _get_preset_loader(preset):
    return _loading().get_loader(preset)


def _loading():
    importlib.import_module(MODELS)
    return importlib.import_module(LOADING)
