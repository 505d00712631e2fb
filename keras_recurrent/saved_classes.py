"""What a saved model of converted attention needs to load again, registered with Keras at import.

Keras imports the module that a file names only for Keras and KerasHub themselves. So a class that
may stand in a file has to be registered by `import keras_recurrent` alone. Classes that need
nothing but Keras are defined here. For classes on top of KerasHub's, placeholders are registered
under their names, so that importing this package reads no attention layer of KerasHub.
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
    def from_config(cls, config):
        return cls.import_class().from_config(config)


def _register_placeholders():
    for module, names in MODULES.items():
        for name in names:
            placeholder = type(name, (Placeholder,), {"module": module})
            keras.saving.register_keras_serializable(PACKAGE)(placeholder)


_register_placeholders()


def import_class(registered_name):
    """Puts the class itself in the place of its placeholder, if there is one by that name.

    KerasHub's `from_preset` looks at the class before it makes an object of it.
    """
    registered = keras.saving.get_registered_object(registered_name)
    if isinstance(registered, type) and issubclass(registered, Placeholder):
        registered.import_class()


@keras.saving.register_keras_serializable(PACKAGE)
class GroupedModel(keras.Model):
    """A functional model where layers of other classes hold grouped attention layers.

    The configurations of those layers do not say so. That of this model therefore has the
    multi-head model, and how many key and value heads each of its attention layers got.
    """

    def __init__(self, inputs, outputs, multi_head, groups, name=None):
        super().__init__(inputs, outputs, name=name)
        self.multi_head = multi_head
        self.groups = groups

    def get_config(self):
        # Keys of a JSON object are strings.
        groups = {str(i): heads for i, heads in self.groups.items()}
        return {"multi_head": self.multi_head, "groups": groups}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        from keras_recurrent.gqa import graphs  # only when asked for

        model = keras.saving.deserialize_keras_object(config["multi_head"], custom_objects)
        groups = {int(i): heads for i, heads in config["groups"].items()}
        return graphs.rebuild(model, groups, config["multi_head"])


@keras.saving.register_keras_serializable(PACKAGE)
class ScheduleTail(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule from one of its steps on: rate(t) = schedule(start + t)."""

    def __init__(self, schedule, start):
        self.schedule = schedule
        self.start = start

    def __call__(self, step):
        return self.schedule(step + self.start)

    def get_config(self):
        schedule = keras.optimizers.schedules.serialize(self.schedule)
        return {"schedule": schedule, "start": self.start}

    @classmethod
    def from_config(cls, config):
        schedule = keras.optimizers.schedules.deserialize(config["schedule"])
        return cls(schedule, config["start"])
