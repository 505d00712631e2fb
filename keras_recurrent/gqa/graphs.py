"""Keras models: functional, sequential, models inside them, and layers that hold attention."""

import keras

from keras_recurrent.gqa import sites as attention
from keras_recurrent.gqa.pooling import transfer
from keras_recurrent.gqa.regroup import regroup, regroup_built, replace_layer


@keras.saving.register_keras_serializable(package="keras_recurrent")
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
        model = keras.saving.deserialize_keras_object(config["multi_head"], custom_objects)
        groups = {int(i): heads for i, heads in config["groups"].items()}
        return rebuild(model, groups, config["multi_head"])


def convert_graph(model, pooling, where):
    """A model like the functional or sequential `model`, with grouped attention."""
    attention.check_classes(model, GroupedModel)
    sites = attention.find_sites(model)
    chosen = dict.fromkeys(attention.choose(sites, pooling.groups, where), pooling.groups)
    attention.check_state(model)
    if isinstance(model, GroupedModel):
        new = rebuild(model, model.groups | chosen, model.multi_head)
    else:
        multi_head = keras.saving.serialize_keras_object(model)
        multi_head.pop("compile_config", None)
        new = rebuild(model, chosen, multi_head)
    transfer(model, new, pooling)
    return new


def rebuild(model, groups, multi_head):
    """A model of the layers of `model`, with `groups` ({position of an attention layer: heads}).

    Layers are made from their configurations, which do not say that attention inside of them was
    grouped: also of a `GroupedModel`, `groups` has to name all of its layers.
    """
    sites = attention.find_sites(model)
    in_graph = {id(sites[i].layer): heads for i, heads in groups.items() if not sites[i].held}

    def clone(layer):
        if id(layer) in in_graph:
            return regroup(layer, in_graph[id(layer)])
        cloned = type(layer).from_config(layer.get_config())
        if hasattr(layer, "_flash_attention"):  # which Keras leaves out of `get_config`
            cloned._flash_attention = layer._flash_attention
        return cloned

    new = keras.models.clone_model(model, clone_function=clone, recursive=True)
    held = {i: heads for i, heads in groups.items() if sites[i].held}
    if not held:
        return new
    new_sites = attention.find_sites(new)
    for i, heads in held.items():
        layer = new_sites[i].layer
        replace_layer(new, layer, regroup_built(layer, heads))
    inputs, outputs = attention.ends(new)
    grouped = GroupedModel(inputs, outputs, multi_head, groups, name=model.name)
    if model.compiled:
        grouped.compile_from_config(model.get_compile_config())
    return grouped
