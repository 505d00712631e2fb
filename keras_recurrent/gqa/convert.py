"""Conversion of whole models from multi-head to grouped-query attention.

This file converts functional and sequential models with nested models and layers, `hub.py` those of
KerasHub.
"""

import keras

from keras_recurrent.compat import BackendNeutralCompileConfig
from keras_recurrent.gqa import sites as attention
from keras_recurrent.gqa.hub import convert_hub, is_hub_model
from keras_recurrent.gqa.pooling import POOLINGS, Pooling, transfer
from keras_recurrent.gqa.regroup import regroup, regroup_built, replace_layer


def convert_to_gqa(model, num_key_value_heads, pooling="mean", where=None, seed=0):
    """Converts a model so that its query heads share `num_key_value_heads` key and value heads.

    With N query heads and G groups, query head n attends with key and value head ⌊n · G / N⌋. The
    key and value projections of a group are pooled from those of its N / G heads:

        W_g = mean of W_h, h = g·N/G … (g + 1)·N/G − 1

    All other weights are copied, and nothing is trained; see `uptraining`. `model` does not change.
    A functional or sequential model is compiled like `model`, with a new optimizer; compile a
    KerasHub task yourself.

    Source: Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from
    Multi-Head Checkpoints", arXiv:2305.13245, §2.

    Args:
        model: a functional or sequential Keras model, which may contain models and layers of other
            classes; or a backbone or a generating task of KerasHub, of a family whose number of key
            and value heads is an argument (Llama, Mistral, Mixtral, Gemma, PaliGemma, T5Gemma,
            Phi-3, Qwen, GPT-OSS, SmolLM3; only decoders change), or of GPT-2, OPT, GPT-NeoX, Bloom,
            BART or T5. Caches shrink by N / G. Grouped layers can be grouped further.
        num_key_value_heads: int, G, which must divide the current number of key and value heads. 1
            is multi-query attention; the current number does not change the outputs.
        pooling: "mean"; "first", the first head of each group; or "random", heads drawn by the
            layer's initializer.
        where: the attention layers to convert: their names or paths, or a function from an
            attention layer to a bool. None: causal self-attention, with `use_causal_mask` or a
            triangular mask in the graph, and cross-attention, whose queries and values are
            different tensors. Bidirectional self-attention, such as in encoders, is only converted
            if it is chosen: it has no cache to shrink, and the paper did not test it.
        seed: int, for "random".

    Returns:
        A new model, of the same class unless its attention needs another one:
        `keras.layers.MultiHeadAttention` becomes `keras.layers.GroupQueryAttention`.
        Weights are pooled in float32 and stored in their dtype.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: G does not divide the heads; the model or a chosen layer cannot be
            converted, is quantized or has LoRA weights; the model has no attention layers, or none
            is chosen; it is a subclassed model without a graph; or the graph does not show how a
            layer of another class uses its attention, and `where` is None. All errors are raised
            before anything is built.

    Example:

    >>> import keras
    >>> from keras_recurrent.conversion import convert_to_gqa
    >>> inputs = keras.Input((None, 32))
    >>> attention = keras.layers.MultiHeadAttention(num_heads=8, key_dim=4, name="attention")
    >>> model = keras.Model(inputs, attention(inputs, inputs, use_causal_mask=True))
    >>> grouped = convert_to_gqa(model, num_key_value_heads=2)
    >>> [tuple(w.shape) for w in grouped.weights if w.path == "attention/key/kernel"]
    [(32, 2, 4)]
    """
    if not isinstance(num_key_value_heads, int) or num_key_value_heads < 1:
        raise ValueError(
            f"`num_key_value_heads` must be an integer of at least 1; got {num_key_value_heads!r}."
        )
    if pooling not in POOLINGS:
        raise ValueError(
            f"`pooling` must be one of {', '.join(map(repr, POOLINGS))}; got {pooling!r}."
        )
    heads = Pooling(pooling, num_key_value_heads, seed)
    if is_hub_model(model):
        return convert_hub(model, heads, where)
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a Keras model; got a {type(model).__name__}.")
    if not attention.is_graph(model):
        raise ValueError(
            f"`{type(model).__name__}` is not a functional model, so it is unknown how it calls "
            "its layers. With `x = keras.Input(...)`, convert `keras.Model(x, model(x))`, and "
            "choose its attention layers by `where`. The class needs a `get_config` that returns "
            "all arguments of its `__init__`, and an `__init__` that passes `**kwargs` to Keras."
        )
    if not model.built:
        raise ValueError("`model` has no weights yet. Call or build it first.")
    return _convert_graph(model, heads, where)


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
        return _rebuild(model, groups, config["multi_head"])


def _convert_graph(model, pooling, where):
    """Converts a functional or sequential model to grouped attention."""
    attention.check_classes(model, GroupedModel)
    sites = attention.find_sites(model)
    chosen = dict.fromkeys(attention.choose_sites(sites, pooling.groups, where), pooling.groups)
    attention.check_plain_weights(model)
    if isinstance(model, GroupedModel):
        new = _rebuild(model, model.groups | chosen, model.multi_head)
    else:
        multi_head = keras.saving.serialize_keras_object(model)
        multi_head.pop("compile_config", None)
        new = _rebuild(model, chosen, multi_head)
    transfer(model, new, pooling)
    return new


def _rebuild(model, groups, multi_head):
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
