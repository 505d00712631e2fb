"""KerasHub's backbones and tasks: which can be converted, and how."""

import operator
from typing import NamedTuple

import keras_hub
from keras_hub import models

from keras_recurrent.gqa import sites as attention
from keras_recurrent.gqa.hub_models import GROUPED_MODELS
from keras_recurrent.gqa.pooling import transfer


class Configured(NamedTuple):
    """Where a backbone with a number of key and value heads has them.

    Attributes:
        heads: the entries of its configuration that hold such numbers, of a decoder only. An
            entry that is None is not in use.
        decoder: the attribute with the list of its decoder layers.
        caches: how often a layer keeps what one projection gives.
    """

    heads: tuple[str, ...] = ("num_key_value_heads",)
    decoder: str = "transformer_layers"
    caches: int = 1

    def decoder_layers(self, backbone):
        return operator.attrgetter(self.decoder)(backbone)


# With `GROUPED_MODELS` in hub_models.py and `REFUSED` below, every backbone that KerasHub exports.
CONFIGURABLE = {
    models.LlamaBackbone: Configured(),
    models.Llama3Backbone: Configured(),
    models.MistralBackbone: Configured(),
    models.MixtralBackbone: Configured(),
    models.GemmaBackbone: Configured(),
    models.Gemma3Backbone: Configured(),
    models.Gemma3nBackbone: Configured(decoder="language_model.transformer_layers"),
    models.Gemma4Backbone: Configured(heads=("num_key_value_heads", "num_global_key_value_heads")),
    models.PaliGemmaBackbone: Configured(),
    models.T5GemmaBackbone: Configured(("decoder_num_key_value_heads",), "decoder_layers"),
    # Its keys and values of the decoder's own tokens and of the encoder's are of one projection.
    models.T5Gemma2Backbone: Configured(("decoder_num_key_value_heads",), "decoder_layers", 2),
    models.Phi3Backbone: Configured(),
    models.QwenBackbone: Configured(),
    models.Qwen3Backbone: Configured(),
    models.Qwen3_5Backbone: Configured(),
    models.QwenMoeBackbone: Configured(),
    models.Qwen3MoeBackbone: Configured(),
    models.Qwen3_5MoeBackbone: Configured(),
    models.GptOssBackbone: Configured(),
    models.SmolLM3Backbone: Configured(),
}

_ENCODER = "it is an encoder, which keeps no keys and values from token to token"
_VISION = "it is no language model and keeps no keys and values from token to token"
_REFUSED = {
    _ENCODER: (
        *("Albert", "Bert", "DebertaV3", "DistilBert", "Electra", "ESM", "Roberta", "RoformerV2"),
        *("XLMRoberta", "XLNet", "CLIP", "MetaCLIP2", "SigLIP", "VideoPrism"),
    ),
    _VISION: (
        *("BASNet", "CSPNet", "DFine", "DINOV2", "DINOV3", "DeepLabV3", "DeiT", "DenseNet"),
        *("DepthAnything", "EfficientNet", "FeaturePyramid", "Flux", "HGNetV2", "MiT", "MobileNet"),
        *("MobileNetV5", "ResNet", "RetinaNet", "SAM", "SAM3PromptableConcept", "SegFormer"),
        *("StableDiffusion3", "SwinTransformer", "VGG", "ViT", "ViTDet", "Xception"),
    ),
    "it mixes tokens by Fourier transforms, without keys and values": ("FNet",),
    "it has a recurrent state in place of keys and values": ("RWKV7",),
    "its attention, FalconAttention, is a class of its own without a grouped one here": ("Falcon",),
    "its attention, WhisperCachedMultiHeadAttention, is a class of its own without a grouped one "
    "here": ("Whisper",),
    "its attention, MoonshineMultiHeadAttention, is a class of its own without a grouped one "
    "here": ("Moonshine",),
    "it holds its language model as a layer that its configuration does not open": ("BLIP2",),
    "its decoder, PARSeqDecoder, reads the few characters of one image and has no cache worth "
    "making smaller": ("PARSeq",),
    "its decoder, EdRecDecoderBlock, is a class of its own without a grouped one here": ("EdRec",),
}
REFUSED = {f"{name}Backbone": reason for reason, names in _REFUSED.items() for name in names}
# Towers of models above, which KerasHub exports as backbones, too.
REFUSED |= {
    f"{name}{tower}Encoder": _ENCODER
    for name in ("CLIP", "MetaCLIP2", "SigLIP")
    for tower in ("Text", "Vision")
}

GROUPED_CLASSES = tuple(GROUPED_MODELS.values())
_SERVED = ", ".join(
    cls.__name__
    for cls in (*CONFIGURABLE, *GROUPED_MODELS)
    if issubclass(cls, keras_hub.models.Backbone)
)


def is_hub(model):
    return isinstance(model, (keras_hub.models.Backbone, keras_hub.models.Task))


def convert_hub(model, pooling, where):
    """A backbone or task like `model`, with fewer key and value heads."""
    is_task = isinstance(model, keras_hub.models.Task)
    backbone = model.backbone if is_task else model
    backbone_cls, groups = _plan(backbone, pooling.groups, where)
    cls = _task_class(model, backbone_cls) if is_task else backbone_cls
    attention.check_state(model)
    new = backbone_cls.from_config(backbone.get_config() | groups)
    if is_task:
        # The preprocessor has nothing that is converted, and its vocabulary is in no config.
        config = model.get_config() | {"backbone": new, "preprocessor": model.preprocessor}
        new = cls.from_config(config)
    transfer(model, new, pooling)
    return new


def decoder_sites(backbone):
    """The attention layers of a backbone of `GROUPED_MODELS` that keep a cache."""
    grouped = GROUPED_MODELS.get(type(backbone), type(backbone))
    sites = []
    for layer in getattr(backbone, grouped.decoder):
        held = [(grouped.self_attention, attention.CAUSAL)]
        if grouped.cross_attention:
            held.append((grouped.cross_attention, attention.CROSS))
        sites += [attention.Site(getattr(layer, name), kind, True) for name, kind in held]
    return sites


def _plan(backbone, groups, where):
    """The class of the new backbone, and what changes in its configuration."""
    cls = type(backbone)
    reason = class_refusal(cls)
    if reason:
        raise ValueError(
            f"A {cls.__name__} cannot be converted: {reason}. These can be: {_SERVED}."
        )
    if cls in CONFIGURABLE:
        return cls, _plan_configured(backbone, groups, where)
    sites = decoder_sites(backbone)
    chosen = attention.choose(sites, groups, where)
    changes = {}
    for name, kind in (
        ("num_key_value_heads", attention.CAUSAL),
        ("cross_num_key_value_heads", attention.CROSS),
    ):
        of_kind = [i for i, site in enumerate(sites) if site.kind == kind]
        if not of_kind:
            continue
        picked = set(of_kind) & set(chosen)
        if picked and picked != set(of_kind):
            raise ValueError(
                f"`where` chooses {len(picked)} of {len(of_kind)} {kind} attention layers. The "
                f"cache of a {cls.__name__} is one array over all of them: choose all or none."
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
            "model. Convert that one, with which they must agree."
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
            f"A {cls.__name__} cannot be converted: of the tasks on a "
            f"{type(task.backbone).__name__} only the one that generates can be. Convert the "
            "backbone, and build the task on it."
        )
    return GROUPED_MODELS[cls]


def class_refusal(cls):
    """Why backbones of this class cannot be converted; None if they can."""
    if cls in CONFIGURABLE or cls in GROUPED_MODELS or cls in GROUPED_CLASSES:
        return None
    if not cls.__module__.startswith("keras_hub."):
        return "it is a class of its own, which may do more with its heads than is known here"
    return REFUSED.get(cls.__name__, "what its attention does with its heads is not known here")
