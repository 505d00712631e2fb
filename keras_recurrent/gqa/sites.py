"""Where a model attends, and which of its attention layers are to be grouped.

By default those whose keys and values a decoder keeps: causal self-attention and cross-attention,
not the self-attention of encoders (Ainslie et al. 2023, arXiv:2305.13245, §2.2).
"""

from typing import Any, NamedTuple

import keras
import keras_hub
import numpy as np

from keras_recurrent.gqa.regroup import is_attention, refusal

CAUSAL, CROSS, ENCODER, UNKNOWN = "causal", "cross", "encoder", "unknown"

# Operations on masks that keep zero what is zero above the diagonal.
_KEEP_ZEROS = ("Cast", "ExpandDims", "LogicalAnd", "Minimum", "Multiply", "BroadcastTo", "Identity")


class Site(NamedTuple):
    """An attention layer of a model.

    Attributes:
        layer: the layer.
        kind: "causal", "cross", "encoder" or, where the graph cannot tell, "unknown".
        held: whether it is part of another layer, and no layer of the graph.
    """

    layer: Any
    kind: str
    held: bool


def find_sites(model):
    """All `Site`s of a functional or sequential model, in the order of its layers."""
    sites, calls = {}, _calls(model)
    for layer in _graph_layers(model):
        if is_attention(layer):
            kinds = {_kind_of_call(*call) for call in calls.get(id(layer), ())}
            kind = kinds.pop() if len(kinds) == 1 else UNKNOWN
            sites.setdefault(id(layer), Site(layer, kind, held=False))
            continue
        for held in layer._flatten_layers(include_self=False):
            if is_attention(held):
                kind = _kind_of_held(layer, held, calls.get(id(layer), ()))
                sites.setdefault(id(held), Site(held, kind, held=True))
    return list(sites.values())


def choose(sites, groups, where):
    """The positions in `sites` of the layers to group, all of which can be.

    Raises:
        ValueError: the graph does not tell and there is no `where`, a name in it is no attention
            layer, nothing is chosen, or something chosen cannot be grouped.
    """
    if where is None:
        unknown = [site.layer.path for site in sites if site.kind == UNKNOWN]
        if unknown:
            raise ValueError(
                f"The graph does not tell whether {_listing(unknown)} attends causally, to another "
                "sequence or, as encoders do, to all of its own. Choose by `where`: names, or a "
                "function of an attention layer, for instance `where=lambda layer: True` for all."
            )
        chosen = [i for i, site in enumerate(sites) if site.kind in (CAUSAL, CROSS)]
    elif callable(where):
        chosen = [i for i, site in enumerate(sites) if where(site.layer)]
    else:
        names = {where} if isinstance(where, str) else set(where)
        known = {name for site in sites for name in (site.layer.name, site.layer.path)}
        if names - known:
            raise ValueError(
                f"`where` names {_listing(sorted(names - known))}; the attention layers here are "
                f"{_listing([site.layer.path for site in sites]) or 'none'}."
            )
        chosen = [i for i, s in enumerate(sites) if names & {s.layer.name, s.layer.path}]
    if not chosen:
        raise ValueError(
            f"There is nothing to convert: of {len(sites)} attention layers "
            + ("`where` chooses none." if where is not None else "none is causal or crosses over.")
        )
    for i in chosen:
        reason = refusal(sites[i].layer, groups)
        if reason:
            raise ValueError(f"{sites[i].layer.path!r} cannot be converted: {reason}.")
    return chosen


def check_groups(num_key_value_heads):
    if not isinstance(num_key_value_heads, int) or num_key_value_heads < 1:
        raise ValueError(
            f"`num_key_value_heads` must be an integer of at least 1; got {num_key_value_heads!r}."
        )


def check_state(model):
    """Raises for weights that are not plain ones: quantized, or low-rank beside others."""
    for layer in model._flatten_layers():
        if layer is not model and getattr(layer, "quantization_mode", None):
            raise ValueError(
                f"{layer.path!r} is quantized ({layer.quantization_mode}), and the mean of heads "
                "is taken of plain weights. Convert first, then `quantize`."
            )
        if getattr(layer, "lora_enabled", False):
            raise ValueError(
                f"{layer.path!r} has LoRA weights, which are not those of fewer heads. Merge "
                "them into a model without LoRA, convert that, then `enable_lora`."
            )


def _graph_layers(model):
    """The layers that the graph calls, those of models inside it in place of the models."""
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if is_graph(layer):
            yield from _graph_layers(layer)
        else:
            yield layer


def is_graph(model):
    """Whether Keras knows the graph of the model: functional, or sequential and built."""
    return isinstance(model, keras.Sequential) or (
        isinstance(model, keras.Model) and hasattr(model, "_nodes_by_depth")
    )


def ends(model):
    """The symbolic inputs and outputs of a functional or a sequential model."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0], model.outputs[0]
    return model.input, model.output


def check_classes(model, *served):
    """Raises for a model of a class that may compute more than its graph, also inside `model`."""
    if not type(model).__module__.startswith("keras.") and not isinstance(model, served):
        raise ValueError(
            f"{model.name!r} is a {type(model).__name__}, and what that class adds to its graph "
            "would be lost. Convert `keras.Model(model.input, model.output)`, or, if it is a "
            "model inside another one, convert it first and build the other on what comes back."
        )
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if is_graph(layer):
            check_classes(layer)


def _calls(model):
    """`{id of a layer: [(args, kwargs), ...]}` of all calls in the graph and in graphs below it."""
    if isinstance(model, keras.Sequential):
        model = keras.Model(*ends(model), name=model.name)
    calls = {}
    for nodes in model._nodes_by_depth.values():
        for node in nodes:
            call = (node.arguments.args, node.arguments.kwargs)
            calls.setdefault(id(node.operation), []).append(call)
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if is_graph(layer):
            calls |= _calls(layer)
    return calls


def _kind_of_call(args, kwargs):
    """Of a direct call of an attention layer."""
    names = ("query", "value", "key", "query_mask", "value_mask", "key_mask", "attention_mask")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("use_causal_mask"):
        return CAUSAL
    if given.get("query") is not given.get("value"):
        return CROSS
    mask = given.get("attention_mask")
    if mask is None or mask.shape[-2] == 1:  # a mask of keys alone, the same for all queries
        return ENCODER
    return CAUSAL if _is_causal(mask) else UNKNOWN


def _is_causal(mask):
    """Whether the graph, or a constant, shows that the mask is zero above the diagonal."""
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


def _kind_of_held(holder, layer, calls):
    """Of an attention layer inside another layer: only KerasHub's own are known."""
    if type(holder) is keras_hub.layers.TransformerDecoder:
        if layer is holder._cross_attention_layer:
            return CROSS
        causal = {kwargs.get("use_causal_mask", True) for _, kwargs in calls}
        return CAUSAL if causal == {True} else UNKNOWN
    if type(holder) is keras_hub.layers.TransformerEncoder:
        return ENCODER
    return UNKNOWN


def _listing(names):
    return ", ".join(map(repr, names))
