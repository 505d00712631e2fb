"""Search for the attention layers of a model, and choice of those to group.

The default choice is the layers whose keys and values a decoder caches: causal self-attention and
cross-attention, not the self-attention of encoders (Ainslie et al. 2023, arXiv:2305.13245, §2.2).
"""

from typing import Any, NamedTuple

import keras
import keras_hub
import numpy as np

from keras_recurrent.gqa.regroup import MULTI_HEAD, is_attention, unsupported_reason

CAUSAL, CROSS, ENCODER, UNKNOWN = "causal", "cross", "encoder", "unknown"

# Operations that keep the zeros of a mask above the diagonal.
_KEEP_ZEROS = ("Cast", "ExpandDims", "LogicalAnd", "Minimum", "Multiply", "BroadcastTo", "Identity")


class Site(NamedTuple):
    """An attention layer of a model.

    Attributes:
        layer: the layer.
        kind: "causal", "cross", "encoder" or, if the graph does not show it, "unknown".
        is_nested: True if it is part of another layer, and not a layer of the graph.
    """

    layer: Any
    kind: str
    is_nested: bool


def find_sites(model):
    """Returns all `Site`s of a functional or sequential model, in the order of its layers."""
    sites, calls = {}, _collect_calls(model)
    for layer in _graph_layers(model):
        if is_attention(layer):
            kinds = {_call_kind(*call) for call in calls.get(id(layer), ())}
            kind = kinds.pop() if len(kinds) == 1 else UNKNOWN
            sites.setdefault(id(layer), Site(layer, kind, is_nested=False))
            continue
        for nested in layer._flatten_layers(include_self=False):
            if is_attention(nested):
                kind = _nested_kind(layer, nested, calls.get(id(layer), ()))
                sites.setdefault(id(nested), Site(nested, kind, is_nested=True))
    return list(sites.values())


def choose_sites(sites, groups, where):
    """Returns the indices into `sites` of the layers to group.

    Raises:
        ValueError: there are no sites, `where` is None and the graph does not show the kind of a
            layer, a name in `where` is not an attention layer, no layer is chosen, or one cannot be
            grouped.
    """
    if not sites:
        supported = ", ".join(cls.__name__ for cls in MULTI_HEAD)
        raise ValueError(
            "There is nothing to convert: `model` has no attention layers of Keras or KerasHub "
            f"({supported}, or their grouped-query versions). A custom attention layer, such as "
            "`LocalAttention` of keras_recurrent, needs its own argument for the number of key and "
            "value heads."
        )
    if where is None:
        unknown = [site.layer.path for site in sites if site.kind == UNKNOWN]
        if unknown:
            raise ValueError(
                f"It is unknown whether {_quote_names(unknown)} attends causally, to another "
                "sequence or, as in encoders, to the whole sequence. Choose the layers to convert "
                "by `where`: names, or a function of an attention layer, such as "
                "`where=lambda layer: True` for all."
            )
        chosen = [i for i, site in enumerate(sites) if site.kind in (CAUSAL, CROSS)]
    elif callable(where):
        chosen = [i for i, site in enumerate(sites) if where(site.layer)]
    else:
        names = {where} if isinstance(where, str) else set(where)
        known = {name for site in sites for name in (site.layer.name, site.layer.path)}
        if names - known:
            raise ValueError(
                f"`where` names {_quote_names(sorted(names - known))}; the attention layers here "
                f"are {_quote_names([site.layer.path for site in sites]) or 'none'}."
            )
        chosen = [i for i, s in enumerate(sites) if names & {s.layer.name, s.layer.path}]
    if not chosen:
        detail = "`where` chooses none."
        if where is None:
            detail = (
                "none is causal or cross-attention. Bidirectional self-attention, as in encoders, "
                "has no cache to shrink, and the GQA paper did not convert it. To convert it "
                "nevertheless, pass `where`, such as `where=lambda layer: True` for all layers."
            )
        raise ValueError(f"There is nothing to convert: of {len(sites)} attention layers {detail}")
    for i in chosen:
        reason = unsupported_reason(sites[i].layer, groups)
        if reason:
            raise ValueError(f"{sites[i].layer.path!r} cannot be converted: {reason}.")
    return chosen


def check_plain_weights(model):
    """Raises an error for quantized weights and for LoRA weights."""
    for layer in model._flatten_layers():
        if layer is not model and getattr(layer, "quantization_mode", None):
            raise ValueError(
                f"{layer.path!r} is quantized ({layer.quantization_mode}), and heads are pooled "
                "from floating-point weights. Convert first, then `quantize`."
            )
        if getattr(layer, "lora_enabled", False):
            raise ValueError(
                f"{layer.path!r} has LoRA weights, which do not fit fewer heads. Merge them into a "
                "model without LoRA, convert that, then `enable_lora`."
            )


def _graph_layers(model):
    """Yields the layers that the graph calls, with nested models replaced by their layers."""
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if is_graph(layer):
            yield from _graph_layers(layer)
        else:
            yield layer


def is_graph(model):
    """Returns True for models whose graph Keras knows: functional and sequential models."""
    return isinstance(model, keras.Sequential) or (
        isinstance(model, keras.Model) and hasattr(model, "_nodes_by_depth")
    )


def get_graph_ends(model):
    """Returns the symbolic inputs and outputs of a functional or sequential model."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0], model.outputs[0]
    return model.input, model.output


def check_classes(model, *served):
    """Raises an error for a model, or a nested one, whose class may compute more than its graph."""
    if not type(model).__module__.startswith("keras.") and not isinstance(model, served):
        raise ValueError(
            f"{model.name!r} is a {type(model).__name__}, and what that class adds to its graph "
            "would be lost. Convert `keras.Model(model.input, model.output)`, or, if it is a "
            "nested model, convert it first and build the outer model on the result."
        )
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if is_graph(layer):
            check_classes(layer)


def _collect_calls(model):
    """Returns `{id of a layer: [(args, kwargs), ...]}` of the graph and of nested graphs."""
    if isinstance(model, keras.Sequential):
        model = keras.Model(*get_graph_ends(model), name=model.name)
    calls = {}
    for nodes in model._nodes_by_depth.values():
        for node in nodes:
            call = (node.arguments.args, node.arguments.kwargs)
            calls.setdefault(id(node.operation), []).append(call)
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if is_graph(layer):
            calls |= _collect_calls(layer)
    return calls


def _call_kind(args, kwargs):
    """Returns the kind of a direct call of an attention layer."""
    names = ("query", "value", "key", "query_mask", "value_mask", "key_mask", "attention_mask")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("use_causal_mask"):
        return CAUSAL
    if given.get("query") is not given.get("value"):
        return CROSS
    mask = given.get("attention_mask")
    if mask is None or mask.shape[-2] == 1:  # one mask of keys for all queries
        return ENCODER
    return CAUSAL if _is_causal(mask) else UNKNOWN


def _is_causal(mask):
    """Returns True if the graph or a constant shows that a mask is zero above the diagonal."""
    if not isinstance(mask, keras.KerasTensor):
        mask = keras.ops.convert_to_numpy(mask).astype(bool)
        return mask.shape[-1] > 1 and not np.triu(mask, 1).any()
    operation, node, _ = mask._keras_history
    if type(operation).__name__ == "Tril":
        return operation.k <= 0
    if type(operation).__name__ not in _KEEP_ZEROS:
        return False
    node = operation._inbound_nodes[node]
    tensors = (*node.arguments.args, *node.arguments.kwargs.values())
    return any(_is_causal(x) for x in tensors if len(getattr(x, "shape", ())) > 1)


def _nested_kind(holder, layer, calls):
    """Returns the kind of an attention layer nested in a layer of KerasHub, or "unknown"."""
    if type(holder) is keras_hub.layers.TransformerDecoder:
        if layer is holder._cross_attention_layer:
            return CROSS
        causal = {kwargs.get("use_causal_mask", True) for _, kwargs in calls}
        return CAUSAL if causal == {True} else UNKNOWN
    if type(holder) is keras_hub.layers.TransformerEncoder:
        return ENCODER
    return UNKNOWN


def _quote_names(names):
    return ", ".join(map(repr, names))
