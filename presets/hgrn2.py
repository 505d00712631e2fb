"""Sizes of the HGRN2 family.

Qin et al. 2024, arXiv:2404.07904, and the published configurations of flash-linear-attention.

A row is one preset. Heads have `expand_ratio` channels. The width inside the SwiGLU is 8/3 of that
of the model, rounded up to a multiple of 256, unless specified. The paper specifies the vocabulary
only for the 44M model of WikiText-103: 32,000 tokens here, with untied output weights, as in the
published checkpoints. `parameters` is the resulting number, which a test verifies. A name is the
paper's label, not a count; depths and widths of 44M, 7B and the image models are
derived from the paper's counts.
"""

from typing import NamedTuple

from keras_recurrent.presets import describe_language_model, describe_weights


class Size(NamedTuple):
    """One language model."""

    hidden_dim: int  # D
    num_layers: int
    intermediate_dim: int
    expand_ratio: int  # K, channels per head
    vocabulary_size: int
    tied: bool  # True if the logits use the weights of the embedding
    parameters: int
    weights: str | None = None  # address of published weights
    sequence_length: int = 1024  # tokens per sequence in the preprocessor

    @property
    def description(self):
        return describe_language_model("HGRN2", self)

    @property
    def backbone_arguments(self):
        return {
            "vocabulary_size": self.vocabulary_size,
            "num_layers": self.num_layers,
            "hidden_dim": self.hidden_dim,
            "intermediate_dim": self.intermediate_dim,
            "expand_ratio": self.expand_ratio,
            "tie_word_embeddings": self.tied,
        }

    @property
    def preprocessor_arguments(self):
        return {"sequence_length": self.sequence_length}


class VisionSize(NamedTuple):
    """One image classifier, of 1,000 classes."""

    hidden_dim: int
    num_layers: int
    intermediate_dim: int
    expand_ratio: int
    image_size: int  # pixels, each side
    patch_size: int
    parameters: int
    weights: str | None = None  # address of published weights

    @property
    def description(self):
        return (
            f"HGRN2 for images of {self.image_size} x {self.image_size} pixels and 1,000 classes, "
            f"with {self.num_layers} blocks of width {self.hidden_dim}. "
            f"{describe_weights(self.weights)}"
        )

    @property
    def backbone_arguments(self):
        return {
            "image_shape": (self.image_size, self.image_size, 3),
            "patch_size": self.patch_size,
            "num_layers": self.num_layers,
            "hidden_dim": self.hidden_dim,
            "intermediate_dim": self.intermediate_dim,
            "expand_ratio": self.expand_ratio,
        }

    @property
    def preprocessor_arguments(self):
        return {}


SIZES = {
    # name                     D layers   M     K vocabulary tied  parameters
    "hgrn2_tiny":        Size(  128,   4,    352,   32,     259, False,       871_296),
    "hgrn2_44m":         Size(  512,   6,  1_376,  128,  50_265,  True,    44_721_152),
    "hgrn2_150m":        Size(  768,  15,  2_048,  128,  32_000, False,   155_367_168),
    "hgrn2_385m":        Size( 1024,  26,  2_816,  128,  32_000, False,   399_614_976),
    "hgrn2_1b":          Size( 2048,  18,  5_632,  128,  32_000, False, 1_056_065_536),
    "hgrn2_2.9b":        Size( 2560,  36,  6_912,  128,  32_000, False, 3_018_959_360),
    "hgrn2_7b":          Size( 4096,  32, 11_008,  128,  32_000, False, 6_738_677_760),
    "hgrn2_1.3b_100b":   Size( 2048,  24,  5_632,  128,  32_000, False, 1_364_396_032,
        weights="hf://fla-hub/hgrn2-1.3B-100B"),
    "hgrn2_2.7b_100b":   Size( 2560,  32,  6_912,  128,  32_000, False, 2_701_724_160,
        weights="hf://fla-hub/hgrn2-2.7B-100B"),
}  # fmt: skip

VISION_SIZES = {
    # name                             D layers   M   K image patch parameters
    "hgrn2_vision_tiny":  VisionSize(192, 12,   576, 64, 224, 16,   6_138_472),
    "hgrn2_vision_small": VisionSize(384, 12, 1_152, 64, 224, 16,  23_777_512),
}  # fmt: skip
