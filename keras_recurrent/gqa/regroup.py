"""Replacement of an attention layer by one with fewer key and value heads."""

import contextlib

import keras
import keras_hub

from keras_recurrent.compat import BloomAttention, GPTNeoXAttention, T5MultiHeadAttention
from keras_recurrent.gqa.attentions import (
    CachedGroupedQueryAttention,
    GroupedBloomAttention,
    GroupedGPTNeoXAttention,
    GroupedT5Attention,
    t5_arguments,
)

# {multi-head attention: grouped attention}
GROUPED_CLASSES = {
    keras.layers.MultiHeadAttention: keras.layers.GroupQueryAttention,
    keras_hub.layers.CachedMultiHeadAttention: CachedGroupedQueryAttention,
    BloomAttention: GroupedBloomAttention,
    GPTNeoXAttention: GroupedGPTNeoXAttention,
    T5MultiHeadAttention: GroupedT5Attention,
}
MULTI_HEAD, GROUPED = tuple(GROUPED_CLASSES), tuple(GROUPED_CLASSES.values())


def is_attention(layer):
    """Returns True for layers of the supported attention classes and their subclasses."""
    return isinstance(layer, MULTI_HEAD + GROUPED)


def num_query_heads(layer):
    return getattr(layer, "num_query_heads", None) or layer.num_heads


def num_key_value_heads(layer):
    return layer.num_key_value_heads if isinstance(layer, GROUPED) else num_query_heads(layer)


def head_dims(layer):
    """Returns the sizes of a key head and of a value head."""
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return layer.key_dim, layer.value_dim
    if isinstance(layer, T5MultiHeadAttention):
        return layer.key_value_dim, layer.key_value_dim
    if isinstance(layer, keras.layers.GroupQueryAttention):
        return layer.head_dim, layer.head_dim
    size = layer._output_dense.kernel.shape[0] // num_query_heads(layer)
    return size, size


def unsupported_reason(layer, groups) -> str | None:
    """Returns the reason why a layer cannot have `groups` key and value heads, or None."""
    heads = num_key_value_heads(layer)
    if heads % groups:
        return f"it has {heads} key and value heads, which {groups} does not divide"
    if type(layer) not in MULTI_HEAD + GROUPED:
        return (
            f"{type(layer).__name__} is a custom class, whose changes would be lost; leave it out "
            "by `where`"
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
            f"`output_shape` is {output_shape}, and keras.layers.GroupQueryAttention returns the "
            f"width of the queries, {query_width}"
        )
    if len(layer.query_dense.equation.partition(",")[0]) != 3:
        return "it attends over more than one axis, or over one of several (`attention_axes`)"
    if value_width != query_width:
        return (
            f"queries have width {query_width} and values {value_width}, and "
            "keras.layers.GroupQueryAttention needs equal widths"
        )
    return None


def regroup(layer, groups):
    """Returns a copy of a layer with `groups` key and value heads, not built."""
    if type(layer) is T5MultiHeadAttention:
        config = t5_arguments(layer) | {
            "name": layer.name,
            "trainable": layer.trainable,
            "dtype": layer.dtype_policy,
        }
    else:
        config = layer.get_config()
    if type(layer) is keras.layers.MultiHeadAttention:
        for name in ("value_dim", "output_shape", "attention_axes"):
            del config[name]
        config["num_query_heads"] = config.pop("num_heads")
        config["head_dim"] = config.pop("key_dim")
    if hasattr(layer, "_flash_attention"):  # missing from `get_config` of Keras
        config["flash_attention"] = layer._flash_attention
    cls = GROUPED_CLASSES.get(type(layer), type(layer))
    return cls.from_config(config | {"num_key_value_heads": groups})


def regroup_built(layer, groups):
    """Returns a copy of a layer with `groups` key and value heads, built with fresh weights."""
    new = regroup(layer, groups)
    if isinstance(layer, T5MultiHeadAttention):
        for name in ("query", "key", "value", "output"):
            before = getattr(layer, f"{name}_projector")
            shape = (None, None, before.kernel.shape[0])
            build_with_same_paths(before, getattr(new, f"{name}_projector"), shape)
        new.built = True
    elif isinstance(layer, (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)):
        projections = (layer._query_dense, layer._value_dense, layer._key_dense)
        shapes = [(None, None, _input_width(projection)) for projection in projections]
        build_with_same_paths(layer, new, *shapes)
    else:
        fused = hasattr(layer, "_qkv_dense")
        width = _input_width(layer._qkv_dense if fused else layer._query_dense)
        build_with_same_paths(layer, new, (None, None, width))
    return new


def _input_width(dense):
    return dense.kernel.shape[0]


def replace_layer(root, old, new):
    """Replaces `old` by `new` in all attributes, lists and dictionaries of layers below `root`.

    The order of layers does not change: files of weights and `model.weights` are those of a model
    that was built with `new`.
    """
    for holder in root._flatten_layers():
        if not any(layer is old for layer in holder._layers):
            continue
        holder._tracker.replace_tracked_value("layers", old, new)
        for name, value in list(vars(holder).items()):
            if name == "_layers":  # the list of the tracker, replaced above
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
        # On torch, a built layer lists all parameters below it: update these lists.
        for layer in root._flatten_layers():
            if hasattr(layer, "_torch_params"):
                layer._track_variables()


def build_with_same_paths(old, new, *args, **kwargs):
    """Builds `new` in the name scopes of `old`, so that its weights have the same paths."""
    with contextlib.ExitStack() as scopes:
        for name in old.path.split("/")[:-1]:
            scopes.enter_context(keras.name_scope(name))
        new.build(*args, **kwargs)
