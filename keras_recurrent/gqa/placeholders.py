"""Placeholders in Keras's registry for the classes of saved converted models.

Keras imports the module named in a file only for classes of Keras and KerasHub. All other classes
in a file must be registered by `import keras_recurrent`. Placeholders registered under their names
avoid importing the modules of these classes before they are needed.
"""

import importlib

import keras

PACKAGE = "keras_recurrent"
# {module: classes}. A module is imported when a file or `convert_to_gqa` first needs it.
MODULES = {
    "keras_recurrent.gqa.attentions": (
        "CachedGroupedQueryAttention",
        "GroupedBloomAttention",
        "GroupedGPTNeoXAttention",
        "GroupedT5Attention",
    ),
    "keras_recurrent.gqa.graphs": ("GroupedModel",),
    "keras_recurrent.gqa.hub_models": (
        "GroupedBartBackbone",
        "GroupedBartSeq2SeqLM",
        "GroupedBloomBackbone",
        "GroupedBloomCausalLM",
        "GroupedGPT2Backbone",
        "GroupedGPT2CausalLM",
        "GroupedGPTNeoXBackbone",
        "GroupedGPTNeoXCausalLM",
        "GroupedOPTBackbone",
        "GroupedOPTCausalLM",
        "GroupedT5Backbone",
        "GroupedT5Seq2SeqLM",
    ),
    "keras_recurrent.gqa.uptraining": ("ScheduleTail",),
}


class Placeholder(keras.Layer):
    """Entry in Keras's registry that imports the class when a model is made from a file.

    Importing the module registers the class itself under the same name.
    """

    module: str

    @classmethod
    def import_class(cls):
        return getattr(importlib.import_module(cls.module), cls.__name__)

    @classmethod
    def from_config(cls, config, custom_objects=None):
        with keras.saving.custom_object_scope(custom_objects or {}):
            return cls.import_class().from_config(config)


def install():
    """Registers a placeholder under the name of each class."""
    for module, names in MODULES.items():
        for name in names:
            placeholder = type(name, (Placeholder,), {"module": module})
            keras.saving.register_keras_serializable(PACKAGE)(placeholder)


def import_class(registered_name):
    """Replaces a placeholder by its class, if there is one with that name.

    KerasHub's `from_preset` inspects the class before it makes an object.
    """
    registered = keras.saving.get_registered_object(registered_name)
    if isinstance(registered, type) and issubclass(registered, Placeholder):
        registered.import_class()
