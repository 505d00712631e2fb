"""Sizes of the HGRN2 family.

Qin et al. 2024, arXiv:2404.07904, and the published configurations of flash-linear-attention.

A row is one preset. Heads have `expand_ratio` channels. The width inside the SwiGLU is 8/3 of that
of the model, rounded up to a multiple of 256, unless specified. The paper specifies the vocabulary
only for the 44M model of WikiText-103: 32,000 tokens here, with untied output weights, as in the
published checkpoints. `parameters` is the resulting number, which a test verifies. A name is the
paper's label, not a count; depths and widths of 44M, 7B and the image models are
derived from the paper's counts.
"""

from keras_recurrent.presets import Preset, describe_weights, language_model


def size(width, depth, mlp_width, expand_ratio, vocabulary, tied, parameters, weights=None):
    arguments = {
        "vocabulary_size": vocabulary,
        "num_layers": depth,
        "hidden_dim": width,
        "intermediate_dim": mlp_width,
        "expand_ratio": expand_ratio,
        "tie_word_embeddings": tied,
    }
    return language_model("HGRN2", arguments, parameters, weights)


def vision_size(width, depth, mlp_width, expand_ratio, image_size, patch_size, parameters):
    """Returns the row of an image classifier of 1,000 classes; sizes of images are in pixels."""
    arguments = {
        "image_shape": (image_size, image_size, 3),
        "patch_size": patch_size,
        "num_layers": depth,
        "hidden_dim": width,
        "intermediate_dim": mlp_width,
        "expand_ratio": expand_ratio,
    }
    description = (
        f"HGRN2 for images of {image_size} x {image_size} pixels and 1,000 classes, with {depth} "
        f"blocks of width {width}. {describe_weights(None)}"
    )
    return Preset(description, arguments, parameters)


SIZES = {
    # name                     D layers   M     K vocabulary tied  parameters
    "hgrn2_tiny":        size(  128,   4,    352,   32,     259, False,       871_296),
    "hgrn2_44m":         size(  512,   6,  1_376,  128,  50_265,  True,    44_721_152),
    "hgrn2_150m":        size(  768,  15,  2_048,  128,  32_000, False,   155_367_168),
    "hgrn2_385m":        size( 1024,  26,  2_816,  128,  32_000, False,   399_614_976),
    "hgrn2_1b":          size( 2048,  18,  5_632,  128,  32_000, False, 1_056_065_536),
    "hgrn2_2.9b":        size( 2560,  36,  6_912,  128,  32_000, False, 3_018_959_360),
    "hgrn2_7b":          size( 4096,  32, 11_008,  128,  32_000, False, 6_738_677_760),
    "hgrn2_1.3b_100b":   size( 2048,  24,  5_632,  128,  32_000, False, 1_364_396_032,
        weights="hf://fla-hub/hgrn2-1.3B-100B"),
    "hgrn2_2.7b_100b":   size( 2560,  32,  6_912,  128,  32_000, False, 2_701_724_160,
        weights="hf://fla-hub/hgrn2-2.7B-100B"),
}  # fmt: skip

VISION_SIZES = {
    # name                              D layers   M   K image patch parameters
    "hgrn2_vision_tiny":  vision_size(192, 12,   576, 64, 224, 16,   6_138_472),
    "hgrn2_vision_small": vision_size(384, 12, 1_152, 64, 224, 16,  23_777_512),
}  # fmt: skip
