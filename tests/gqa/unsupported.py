"""Names of KerasHub's backbones that `convert_to_gqa` does not support."""

_NO_CACHE = (
    *("Albert", "Bert", "DebertaV3", "DistilBert", "Electra", "ESM", "Roberta", "RoformerV2"),
    *("XLMRoberta", "XLNet", "CLIP", "MetaCLIP2", "SigLIP", "VideoPrism"),
    *("BASNet", "CSPNet", "DFine", "DINOV2", "DINOV3", "DeepLabV3", "DeiT", "DenseNet"),
    *("DepthAnything", "EfficientNet", "FeaturePyramid", "Flux", "HGNetV2", "MiT", "MobileNet"),
    *("MobileNetV5", "ResNet", "RetinaNet", "SAM", "SAM3PromptableConcept", "SegFormer"),
    *("StableDiffusion3", "SwinTransformer", "VGG", "ViT", "ViTDet", "Xception"),
    "FNet",  # Fourier transforms
    "RWKV7",  # recurrent state
    "PARSeq",  # reads the few characters of one image
)
_NO_GROUPED_VERSION = (
    "Falcon",  # FalconAttention
    "Whisper",  # WhisperCachedMultiHeadAttention
    "Moonshine",  # MoonshineMultiHeadAttention
    "EdRec",  # EdRecDecoderBlock
    "BLIP2",  # its language model is a layer that its configuration does not open
)
# Towers of models above, which KerasHub exports as backbones, too.
_TOWERS = (
    f"{name}{tower}Encoder"
    for name in ("CLIP", "MetaCLIP2", "SigLIP")
    for tower in ("Text", "Vision")
)
UNSUPPORTED = {*(f"{name}Backbone" for name in (*_NO_CACHE, *_NO_GROUPED_VERSION)), *_TOWERS}
