"""Grouped-query versions of KerasHub's models with multi-head attention and a cache."""

from typing import Any

import keras
import keras_hub
from keras import ops

from keras_recurrent.gqa.regroup import regroup_built, replace_layer

Mixin: Any = object  # hides from type checkers that the methods of the other base are missing


class GroupedBackbone(Mixin):
    """Mixin for a backbone: reduces the key and value heads of its decoder's attention layers.

    Args:
        num_key_value_heads: int, heads of the decoder's self-attention.
        cross_num_key_value_heads: int, heads of the decoder's cross-attention, if it has any.
    """

    decoder = "transformer_layers"
    self_attention = "_self_attention_layer"
    cross_attention: str | None = None

    def __init__(self, *, num_key_value_heads, cross_num_key_value_heads=None, **kwargs):
        super().__init__(**kwargs)
        self.num_key_value_heads = num_key_value_heads
        self.cross_num_key_value_heads = cross_num_key_value_heads
        for layer in getattr(self, self.decoder):
            self._regroup(layer, self.self_attention, num_key_value_heads)
            if self.cross_attention:
                self._regroup(layer, self.cross_attention, cross_num_key_value_heads)

    def _regroup(self, layer, name, groups):
        attention = getattr(layer, name)
        replace_layer(self, attention, regroup_built(attention, groups))

    def get_config(self):
        config = super().get_config() | {"num_key_value_heads": self.num_key_value_heads}
        if self.cross_attention:
            config["cross_num_key_value_heads"] = self.cross_num_key_value_heads
        return config


class GroupedCausalLM(Mixin):
    """Mixin for a causal language model: makes a cache with `num_key_value_heads` heads."""

    def _build_cache(self, token_ids):
        backbone = self.backbone
        batch, length = ops.shape(token_ids)
        head_dim = backbone.hidden_dim // backbone.num_heads
        shape = (batch, backbone.num_layers, 2, length, backbone.num_key_value_heads, head_dim)
        cache = ops.zeros(shape, dtype=self.compute_dtype)
        _, hidden_states, cache = self.call_with_cache(token_ids, cache, 0)
        return hidden_states, cache


class GroupedSeq2SeqLM(Mixin):
    """Mixin for an encoder-decoder model: makes both caches with the reduced number of heads."""

    def _initialize_cache(self, encoder_token_ids, decoder_token_ids):
        backbone = self.backbone
        head_dim = getattr(backbone, "key_value_dim", None)
        head_dim = head_dim or backbone.hidden_dim // backbone.num_heads
        batch, encoder_length = ops.shape(encoder_token_ids)
        decoder_length = ops.shape(decoder_token_ids)[1]

        def zeros(length, heads):
            shape = (batch, backbone.num_layers, 2, length, heads, head_dim)
            return ops.zeros(shape, dtype=self.compute_dtype)

        return (
            zeros(decoder_length, backbone.num_key_value_heads),
            zeros(encoder_length, backbone.cross_num_key_value_heads),
        )


# {family: base class of its model that generates, attributes of its grouped backbone}
FAMILIES: dict[str, Any] = {
    **dict.fromkeys(("GPT2", "OPT", "GPTNeoX", "Bloom"), (GroupedCausalLM, {})),
    "Bart": (
        GroupedSeq2SeqLM,
        {"decoder": "decoder_transformer_layers", "cross_attention": "_cross_attention_layer"},
    ),
    "T5": (
        GroupedSeq2SeqLM,
        {
            "decoder": "decoder_transformer_layers",
            "self_attention": "self_attention",
            "cross_attention": "cross_attention",
        },
    ),
}
# {multi-head model: grouped version}, for backbones and for the tasks that generate.
GROUPED_MODELS: dict[Any, Any] = {}


def _add_grouped(mixin, multi_head, **attributes):
    """Makes the grouped version of a model, such as `GroupedGPT2Backbone`, and registers it."""
    attributes["__module__"] = __name__
    cls = type(f"Grouped{multi_head.__name__}", (mixin, multi_head), attributes)
    GROUPED_MODELS[multi_head] = cls
    return keras.saving.register_keras_serializable(package="keras_recurrent")(cls)


for _family, (_mixin, _attributes) in FAMILIES.items():
    _kind = _mixin.__name__.removeprefix("Grouped")
    _backbone, _task = (getattr(keras_hub.models, f"{_family}{k}") for k in ("Backbone", _kind))
    # The preprocessor of the multi-head model; see `keras_recurrent.checkpoints.loading`.
    _attributes = {"preprocessed_as": _backbone, **_attributes}
    _add_grouped(
        _mixin, _task, backbone_cls=_add_grouped(GroupedBackbone, _backbone, **_attributes)
    )
