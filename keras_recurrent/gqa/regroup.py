"""An attention layer with fewer key and value heads in the place of another one."""

import contextlib

import keras
import keras_hub

from keras_recurrent.compat import BloomAttention, GPTNeoXAttention, T5MultiHeadAttention
from keras_recurrent.gqa.attentions import (
    CachedGroupedQueryAttention,
    GroupedBloomAttention,
    GroupedGPTNeoXAttention,
    GroupedT5Attention,
)

MULTI_HEAD = (
    keras.layers.MultiHeadAttention,
    keras_hub.layers.CachedMultiHeadAttention,
    BloomAttention,
    GPTNeoXAttention,
    T5MultiHeadAttention,
)
GROUPED = (
    keras.layers.GroupQueryAttention,
    CachedGroupedQueryAttention,
    GroupedBloomAttention,
    GroupedGPTNeoXAttention,
    GroupedT5Attention,
)


def is_attention(layer):
    """Whether the layer has key and value heads that this package knows of, or a subclass does."""
    return isinstance(layer, MULTI_HEAD + GROUPED)


def num_query_heads(layer):
    heads = getattr(layer, "num_query_heads", None)
    return layer.num_heads if heads is None else heads


def num_key_value_heads(layer):
    return layer.num_key_value_heads if isinstance(layer, GROUPED) else num_query_heads(layer)


def head_dims(layer):
    """The sizes of a key head and of a value head."""
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return layer.key_dim, layer.value_dim
    if isinstance(layer, T5MultiHeadAttention):
        return layer.key_value_dim, layer.key_value_dim
    if isinstance(layer, keras.layers.GroupQueryAttention):
        return layer.head_dim, layer.head_dim
    size = layer._output_dense.kernel.shape[0] // num_query_heads(layer)
    return size, size


def refusal(layer, groups):
    """Why the layer cannot get `groups` key and value heads; None if it can."""
    heads = num_key_value_heads(layer)
    if heads % groups:
        return f"it has {heads} key and value heads, which {groups} does not divide"
    if type(layer) not in MULTI_HEAD + GROUPED:
        return (
            f"{type(layer).__name__} is a class of its own, and what it changes would be lost; "
            "leave it out by `where`"
        )
    if type(layer) is not keras.layers.MultiHeadAttention:
        return None
    if layer.value_dim != layer.key_dim:
        return (
            f"`value_dim` is {layer.value_dim} and `key_dim` {layer.key_dim}, and "
            "keras.layers.GroupQueryAttention has one size for both"
        )
    query_width, value_width = _input_width(layer.query_dense), _input_width(layer.value_dense)
    output_shape = layer.get_config()["output_shape"]
    if output_shape not in (None, (query_width,)):
        return (
            f"`output_shape` is {output_shape}, and keras.layers.GroupQueryAttention gives back "
            f"the width of the queries, {query_width}"
        )
    if len(layer.query_dense.equation.partition(",")[0]) != 3:
        return "it attends over more than one axis, or over one among others (`attention_axes`)"
    if value_width != query_width:
        return (
            f"queries have width {query_width} and values {value_width}, and "
            "keras.layers.GroupQueryAttention wants the same"
        )
    return None


def regrouped_config(layer, groups):
    """The class that takes the layer's place, and the arguments that make it."""
    if type(layer) is T5MultiHeadAttention:
        return GroupedT5Attention, _t5_config(layer) | {"num_key_value_heads": groups}
    config = layer.get_config()
    if type(layer) is keras.layers.MultiHeadAttention:
        for name in ("value_dim", "output_shape", "attention_axes"):
            del config[name]
        config["num_query_heads"] = config.pop("num_heads")
        config["head_dim"] = config.pop("key_dim")
        cls = keras.layers.GroupQueryAttention
    elif type(layer) is GPTNeoXAttention:
        del config["max_sequence_length"]
        cls = GroupedGPTNeoXAttention
    else:
        cls = {
            keras_hub.layers.CachedMultiHeadAttention: CachedGroupedQueryAttention,
            BloomAttention: GroupedBloomAttention,
        }.get(type(layer), type(layer))
    if hasattr(layer, "_flash_attention"):  # which Keras leaves out of `get_config`
        config["flash_attention"] = layer._flash_attention
    return cls, config | {"num_key_value_heads": groups}


def _t5_config(layer):
    """What `get_config` would give if the layer had it."""
    return {
        "name": layer.name,
        "trainable": layer.trainable,
        "dtype": layer.dtype_policy,
        "is_decoder": layer.is_decoder,
        "hidden_dim": layer.hidden_dim,
        "key_value_dim": layer.key_value_dim,
        "num_heads": layer.num_heads,
        "dropout": layer.dropout_layer.rate,
        "use_relative_attention_bias": layer.use_relative_attention_bias,
    }


def regroup(layer, groups):
    """A layer with `groups` key and value heads, not built."""
    cls, config = regrouped_config(layer, groups)
    return cls.from_config(config)


def regroup_built(layer, groups):
    """A layer with `groups` key and value heads, built as `layer` is; its weights are fresh."""
    new = regroup(layer, groups)
    if isinstance(layer, T5MultiHeadAttention):
        for name in ("query", "key", "value", "output"):
            before = getattr(layer, f"{name}_projector")
            shape = (None, None, before.kernel.shape[0])
            build_with_paths_of(before, getattr(new, f"{name}_projector"), shape)
        new.built = True
    elif isinstance(layer, (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)):
        projections = (layer._query_dense, layer._value_dense, layer._key_dense)
        shapes = [(None, None, _input_width(projection)) for projection in projections]
        build_with_paths_of(layer, new, *shapes)
    else:
        fused = hasattr(layer, "_qkv_dense")
        width = _input_width(layer._qkv_dense if fused else layer._query_dense)
        build_with_paths_of(layer, new, (None, None, width))
    return new


def _input_width(dense):
    return dense.kernel.shape[0]


def replace_layer(root, old, new):
    """Puts `new` wherever `old` is held below `root`: attributes, lists, dictionaries.

    The order of the layers stays, so files of weights and the order of `model.weights` fit those
    of a model that was built with `new` from the start.
    """
    for holder in root._flatten_layers():
        if not any(layer is old for layer in holder._layers):
            continue
        holder._tracker.replace_tracked_value("layers", old, new)
        for name, value in list(vars(holder).items()):
            if name == "_layers":  # the tracker's own list
                continue
            if value is old:
                setattr(holder, name, new)
            elif isinstance(value, list):
                for i, entry in enumerate(value):
                    if entry is old:
                        list.__setitem__(value, i, new)
            elif isinstance(value, dict):
                for key, entry in value.items():
                    if entry is old:
                        dict.__setitem__(value, key, new)
    if keras.backend.backend() == "torch":
        # A built layer lists all parameters below it for torch: make those lists anew.
        for layer in root._flatten_layers():
            if hasattr(layer, "_torch_params"):
                layer._track_variables()


def build_with_paths_of(old, new, *args, **kwargs):
    """Builds `new` under the names that `old` was built under, so its weights have those paths."""
    with contextlib.ExitStack() as scopes:
        for name in old.path.split("/")[:-1]:
            scopes.enter_context(keras.name_scope(name))
        new.build(*args, **kwargs)
