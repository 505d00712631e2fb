"""Conversion of functional and sequential models, with nested models and layers."""

import keras

from keras_recurrent.compat import BackendNeutralCompileConfig
from keras_recurrent.gqa import sites as attention
from keras_recurrent.gqa.pooling import transfer
from keras_recurrent.gqa.regroup import regroup, regroup_built, replace_layer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GroupedModel(BackendNeutralCompileConfig, keras.Model):
    """Functional model with grouped attention layers nested in layers of other classes.

    The configurations of those layers do not show the grouping. The configuration of this model
    therefore has the multi-head model and the number of key and value heads of each attention
    layer.
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
    """Converts a functional or sequential model to grouped attention."""
    attention.check_classes(model, GroupedModel)
    sites = attention.find_sites(model)
    chosen = dict.fromkeys(attention.choose_sites(sites, pooling.groups, where), pooling.groups)
    attention.check_plain_weights(model)
    if isinstance(model, GroupedModel):
        new = rebuild(model, model.groups | chosen, model.multi_head)
    else:
        multi_head = keras.saving.serialize_keras_object(model)
        multi_head.pop("compile_config", None)
        new = rebuild(model, chosen, multi_head)
    transfer(model, new, pooling)
    return new


def rebuild(model, groups, multi_head):
    """Rebuilds `model` with grouped attention; `groups` is `{index of attention layer: heads}`.

    Layers are made from their configurations, which do not show grouped attention nested in them:
    `groups` must have all grouped layers, including those that a `GroupedModel` already has.
    """
    sites = attention.find_sites(model)
    in_graph = {id(sites[i].layer): heads for i, heads in groups.items() if not sites[i].is_nested}

    def clone(layer):
        if id(layer) in in_graph:
            return regroup(layer, in_graph[id(layer)])
        cloned = type(layer).from_config(layer.get_config())
        if hasattr(layer, "_flash_attention"):  # missing from `get_config` of Keras
            cloned._flash_attention = layer._flash_attention
        return cloned

    new = keras.models.clone_model(model, clone_function=clone, recursive=True)
    nested = {i: heads for i, heads in groups.items() if sites[i].is_nested}
    if not nested:
        return new
    new_sites = attention.find_sites(new)
    for i, heads in nested.items():
        layer = new_sites[i].layer
        replace_layer(new, layer, regroup_built(layer, heads))
    inputs, outputs = attention.get_graph_ends(new)
    grouped = GroupedModel(inputs, outputs, multi_head, groups, name=model.name)
    if model.compiled:
        grouped.compile_from_config(model.get_compile_config())
    return grouped
