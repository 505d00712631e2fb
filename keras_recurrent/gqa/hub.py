"""Conversion of KerasHub's backbones and tasks."""

import inspect
import operator
from typing import NamedTuple

import keras_hub
from keras_hub import models

from keras_recurrent.gqa import sites as attention
from keras_recurrent.gqa.hub_models import GROUPED_MODELS
from keras_recurrent.gqa.pooling import transfer


class HeadConfig(NamedTuple):
    """Location of the key and value heads in a backbone that has their number as an argument.

    Attributes:
        heads: the entries of the configuration with the number of heads of the decoder. Entries
            that are None are ignored.
        decoder: the attribute with the list of decoder layers.
        caches: the number of caches that a layer fills from one projection.
    """

    heads: tuple[str, ...] = ("num_key_value_heads",)
    decoder: str = "transformer_layers"
    caches: int = 1

    def decoder_layers(self, backbone):
        return operator.attrgetter(self.decoder)(backbone)


# Together with `GROUPED_MODELS` in hub_models.py, all backbones that can be converted.
CONFIGURABLE = {
    models.LlamaBackbone: HeadConfig(),
    models.Llama3Backbone: HeadConfig(),
    models.MistralBackbone: HeadConfig(),
    models.MixtralBackbone: HeadConfig(),
    models.GemmaBackbone: HeadConfig(),
    models.Gemma3Backbone: HeadConfig(),
    models.Gemma3nBackbone: HeadConfig(decoder="language_model.transformer_layers"),
    models.Gemma4Backbone: HeadConfig(heads=("num_key_value_heads", "num_global_key_value_heads")),
    models.PaliGemmaBackbone: HeadConfig(),
    models.T5GemmaBackbone: HeadConfig(("decoder_num_key_value_heads",), "decoder_layers"),
    # One projection makes the keys and values of both the decoder's and the encoder's tokens.
    models.T5Gemma2Backbone: HeadConfig(("decoder_num_key_value_heads",), "decoder_layers", 2),
    models.Phi3Backbone: HeadConfig(),
    models.QwenBackbone: HeadConfig(),
    models.Qwen3Backbone: HeadConfig(),
    models.Qwen3_5Backbone: HeadConfig(),
    models.QwenMoeBackbone: HeadConfig(),
    models.Qwen3MoeBackbone: HeadConfig(),
    models.Qwen3_5MoeBackbone: HeadConfig(),
    models.GptOssBackbone: HeadConfig(),
    models.SmolLM3Backbone: HeadConfig(),
}

GROUPED_CLASSES = tuple(GROUPED_MODELS.values())
_SUPPORTED = ", ".join(
    cls.__name__
    for cls in (*CONFIGURABLE, *GROUPED_MODELS)
    if issubclass(cls, keras_hub.models.Backbone)
)


def is_hub_model(model):
    return isinstance(model, (keras_hub.models.Backbone, keras_hub.models.Task))


def convert_hub(model, pooling, where):
    """Converts a backbone or task to fewer key and value heads."""
    is_task = isinstance(model, keras_hub.models.Task)
    backbone = model.backbone if is_task else model
    backbone_cls, groups = _plan(backbone, pooling.groups, where)
    cls = _task_class(model, backbone_cls) if is_task else backbone_cls
    attention.check_plain_weights(model)
    new = backbone_cls.from_config(backbone.get_config() | groups)
    if is_task:
        # The preprocessor is reused: it needs no conversion, and no config has its vocabulary.
        config = model.get_config() | {"backbone": new, "preprocessor": model.preprocessor}
        new = cls.from_config(config)
    transfer(model, new, pooling)
    return new


def decoder_sites(backbone):
    """Returns the cached attention layers of a backbone of `GROUPED_MODELS`."""
    grouped = GROUPED_MODELS.get(type(backbone), type(backbone))
    sites = []
    for layer in getattr(backbone, grouped.decoder):
        decoder_attention = [(grouped.self_attention, attention.CAUSAL)]
        if grouped.cross_attention:
            decoder_attention.append((grouped.cross_attention, attention.CROSS))
        sites += [
            attention.Site(getattr(layer, name), kind, True) for name, kind in decoder_attention
        ]
    return sites


def _plan(backbone, groups, where):
    """Returns the class of the new backbone and the changes to its configuration."""
    cls = type(backbone)
    reason = unsupported_class_reason(cls)
    if reason:
        raise ValueError(f"`{cls.__name__}` cannot be converted: {reason}.")
    if cls in CONFIGURABLE:
        return cls, _plan_configured(backbone, groups, where)
    sites = decoder_sites(backbone)
    chosen = attention.choose_sites(sites, groups, where)
    changes = {}
    for name, kind in (
        ("num_key_value_heads", attention.CAUSAL),
        ("cross_num_key_value_heads", attention.CROSS),
    ):
        site_indices = [i for i, site in enumerate(sites) if site.kind == kind]
        if not site_indices:
            continue
        picked = set(site_indices) & set(chosen)
        if picked and picked != set(site_indices):
            raise ValueError(
                f"`where` chooses {len(picked)} of {len(site_indices)} {kind} attention layers. "
                f"The cache of a {cls.__name__} is one array over all of them: choose all or none."
            )
        changes[name] = groups if picked else getattr(backbone, name, backbone.num_heads)
    return GROUPED_MODELS.get(cls, cls), changes


def _plan_configured(backbone, groups, where):
    name, configured = type(backbone).__name__, CONFIGURABLE[type(backbone)]
    if where is not None:
        raise ValueError(
            f"`where` cannot choose among the layers of a {name}: its configuration has one number "
            "of key and value heads for all of them. Leave it out."
        )
    layers = configured.decoder_layers(backbone)
    if all(getattr(layer, "is_kv_shared_layer", False) for layer in layers):
        raise ValueError(
            f"This {name} cannot be converted: all its layers read the keys and values of another "
            "model. Convert that model, whose heads they must match."
        )
    config = backbone.get_config()
    entries = [entry for entry in configured.heads if config[entry] is not None]
    for entry in entries:
        if config[entry] % groups:
            raise ValueError(
                f"`num_key_value_heads` must divide the {config[entry]} key and value heads of the "
                f"{name} (`{entry}` in its configuration); got {groups}."
            )
    return dict.fromkeys(entries, groups)


def _task_class(task, backbone_cls):
    cls = type(task)
    if backbone_cls is type(task.backbone):
        return cls
    if cls not in GROUPED_MODELS:
        raise ValueError(
            f"`{cls.__name__}` cannot be converted: of the tasks on a "
            f"`{type(task.backbone).__name__}`, only the one that generates text can be. Convert "
            "the backbone, and build the task on it."
        )
    return GROUPED_MODELS[cls]


def unsupported_class_reason(cls) -> str | None:
    """Returns the reason why backbones of this class cannot be converted, or None."""
    if cls in CONFIGURABLE or cls in GROUPED_MODELS or cls in GROUPED_CLASSES:
        return None
    if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
        if "num_key_value_heads" in inspect.signature(cls.__init__).parameters:
            return "build it with `num_key_value_heads` and train it so"
        return "it has no keys and values that query heads could share"
    if not cls.__module__.startswith("keras_hub."):
        return (
            "it is a custom class, which may use its heads in other ways. Supported backbones of "
            f"KerasHub: {_SUPPORTED}"
        )
    return (
        "it has no cache of keys and values, as encoders and vision models, or its attention has "
        f"no grouped-query version in this package. Supported: {_SUPPORTED}"
    )
