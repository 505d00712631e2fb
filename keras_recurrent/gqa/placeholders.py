"""What a saved model of converted attention needs to load again, registered with Keras at import.

Keras imports the module that a file names only for Keras and KerasHub themselves. So a class that
may stand in a file has to be registered by `import keras_recurrent` alone. Placeholders are
registered under the names of these classes, so that importing this package loads none of them.
"""

import importlib

import keras

PACKAGE = "keras_recurrent"
# Classes whose modules load when a file, or `convert_to_gqa`, first needs them.
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
    """Stands in Keras's registry for a class that is imported when a model is made from a file.

    Importing its module registers the class itself under the same name, in this one's place.
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
    """Puts the class itself in the place of its placeholder, if there is one by that name.

    KerasHub's `from_preset` looks at the class before it makes an object of it.
    """
    registered = keras.saving.get_registered_object(registered_name)
    if isinstance(registered, type) and issubclass(registered, Placeholder):
        registered.import_class()
