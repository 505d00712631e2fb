"""Which of KerasHub's backbones can be grouped by their configuration, and which cannot be at all.

With `GROUPED_MODELS` in `hub_models.py`, these tables name every backbone that KerasHub exports.
"""

import operator
from typing import NamedTuple

from keras_hub import models


class Configured(NamedTuple):
    """Where a backbone with a number of key and value heads has them.

    Attributes:
        heads: the entries of its configuration that hold such numbers, of a decoder only. One may
            be None: it is not in use.
        decoder: the attribute with the list of its decoder layers.
        caches: how often a layer keeps what one projection gives.
    """

    heads: tuple[str, ...] = ("num_key_value_heads",)
    decoder: str = "transformer_layers"
    caches: int = 1

    def decoder_layers(self, backbone):
        return operator.attrgetter(self.decoder)(backbone)


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
