"""Table of the parameters and the cache size before and after a conversion."""

import keras
import keras_hub
import numpy as np

from keras_recurrent.gqa import sites as attention
from keras_recurrent.gqa.hub import CONFIGURABLE, decoder_sites, is_hub_model
from keras_recurrent.gqa.regroup import head_dims, num_key_value_heads


def gqa_report(before, after, context_length=4096):
    """Returns a Markdown table of parameters and cached keys and values, before and after.

    A layer with G key and value heads of sizes K and V caches G (K + V) numbers per token, in the
    compute dtype. The table counts layers whose keys and values a decoder caches. It does not count
    the cache of bidirectional self-attention, as in encoders, where only the parameters shrink.
    Cross-attention caches those of the encoder's tokens; encoder and decoder are both assumed to
    have `context_length` tokens.

    Args:
        before: the model passed to `convert_to_gqa`.
        after: the model that it returned.
        context_length: int, tokens.

    Returns:
        A string of several lines.

    Raises:
        ValueError: a model is not built.

    Example:

    >>> import keras
    >>> from keras_recurrent.conversion import convert_to_gqa, gqa_report
    >>> inputs = keras.Input((None, 32))
    >>> attention = keras.layers.MultiHeadAttention(num_heads=8, key_dim=4)
    >>> model = keras.Model(inputs, attention(inputs, inputs, use_causal_mask=True))
    >>> print(gqa_report(model, convert_to_gqa(model, 2), context_length=1024))
    |  | before | after | after / before |
    | --- | ---: | ---: | ---: |
    | parameters | 4,224 | 2,640 | 0.625 |
    | key-value bytes a token | 256 | 64 | 0.250 |
    | key-value bytes at 1,024 tokens | 262,144 | 65,536 | 0.250 |
    """
    for name, model in (("before", before), ("after", after)):
        if not model.built:
            raise ValueError(f"`{name}` has no weights yet. Call the model on data, or build it.")
    bytes_a_token = [key_value_bytes(model) for model in (before, after)]
    rows = {
        "parameters": [before.count_params(), after.count_params()],
        "key-value bytes a token": bytes_a_token,
        f"key-value bytes at {context_length:,} tokens": [
            n * context_length for n in bytes_a_token
        ],
    }
    lines = ["|  | before | after | after / before |", "| --- | ---: | ---: | ---: |"]
    for name, (old, new) in rows.items():
        ratio = f"{new / old:.3f}" if old else "–"
        lines.append(f"| {name} | {old:,} | {new:,} | {ratio} |")
    return "\n".join(lines)


def key_value_bytes(model):
    """Returns the bytes of keys and values that a decoder caches for one token."""
    if isinstance(model, keras_hub.models.Task):
        model = model.backbone
    if type(model) in CONFIGURABLE:
        configured = CONFIGURABLE[type(model)]
        layers = configured.decoder_layers(model)
        return configured.caches * sum(_projected_bytes(layer) for layer in layers)
    sites = decoder_sites(model) if is_hub_model(model) else attention.find_sites(model)
    return sum(_site_bytes(site.layer) for site in sites if site.kind != attention.ENCODER)


def _site_bytes(layer):
    return (
        num_key_value_heads(layer) * sum(head_dims(layer)) * np.dtype(layer.compute_dtype).itemsize
    )


def _projected_bytes(decoder):
    """Returns the bytes per token of keys, and of values of equal size, of a decoder layer."""
    if getattr(decoder, "is_kv_shared_layer", False):  # uses the cache of a layer below
        return 0
    keys = [layer for layer in decoder._flatten_layers() if layer.name in ("key", "k_proj")]
    return sum(2 * _output_size(key) * np.dtype(key.compute_dtype).itemsize for key in keys)


def _output_size(dense):
    if isinstance(dense, keras.layers.Dense):
        return dense.units
    return int(np.prod(dense.partial_output_shape[1:]))
