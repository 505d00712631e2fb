"""Sizes of LFM2 and LFM2.5, hybrids of gated short convolutions and attention.

Liquid AI 2025, arXiv:2511.23404, and the published configurations and model cards. The weights have
the license that their authors call LFM Open License v1.0.

A row is one preset. `parameters` is the resulting parameter count, which a test verifies. A name
is the publication's label, not a count.
"""

from typing import NamedTuple

from keras_recurrent.presets import describe_language_model

CONVOLUTION, ATTENTION = "gated_short_conv", "global_attention"


class Size(NamedTuple):
    """One row of the table."""

    label: str
    hidden_dim: int  # D
    num_layers: int
    attention: tuple[int, ...]  # indices of the attention blocks
    heads: int  # query heads
    intermediate_dim: int
    parameters: int
    weights: str | None = None  # address of published weights
    vocabulary_size: int = 65_536
    key_value_heads: int = 8
    head_dim: int = 64
    rope_max_wavelength: float = 1_000_000.0
    sequence_length: int = 1024  # tokens per sequence in the preprocessor
    tied: bool = True  # the logits use the weights of the embedding

    @property
    def description(self):
        return describe_language_model(self.label, self)

    @property
    def license(self):
        return "LFM Open License v1.0" if self.weights else None

    @property
    def backbone_arguments(self):
        blocks = range(self.num_layers)
        return {
            "vocabulary_size": self.vocabulary_size,
            "num_layers": self.num_layers,
            "hidden_dim": self.hidden_dim,
            "intermediate_dim": self.intermediate_dim,
            "block_types": tuple(ATTENTION if i in self.attention else CONVOLUTION for i in blocks),
            "num_query_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "rope_max_wavelength": self.rope_max_wavelength,
            "tie_word_embeddings": self.tied,
        }

    @property
    def preprocessor_arguments(self):
        return {"sequence_length": self.sequence_length}


BLOCKS_14, BLOCKS_16 = (2, 4, 6, 8, 10, 12), (2, 5, 8, 10, 12, 14)
BLOCKS_30 = (2, 5, 9, 13, 17, 21, 24, 27)

SIZES = {
    # name                           D depth attention heads SwiGLU parameters
    "lfm2_tiny": Size("LFM2",        128,  4, (2,),  4,   352,       821_952,
        vocabulary_size=259, key_value_heads=2, head_dim=32),
    "lfm2_350m": Size("LFM2",       1024, 16, BLOCKS_16, 16,  4_608,   354_483_968,
        "hf://LiquidAI/LFM2-350M"),
    "lfm2_700m": Size("LFM2",       1536, 16, BLOCKS_16, 24,  6_912,   742_489_344,
        "hf://LiquidAI/LFM2-700M"),
    "lfm2_1.2b": Size("LFM2",       2048, 16, BLOCKS_16, 32,  8_192, 1_170_340_608,
        "hf://LiquidAI/LFM2-1.2B"),
    "lfm2_2.6b": Size("LFM2",       2048, 30, BLOCKS_30, 32, 10_752, 2_569_272_320,
        "hf://LiquidAI/LFM2-2.6B"),
    "lfm2.5_230m": Size("LFM2.5",   1024, 14, BLOCKS_14, 16,  2_560,   229_693_184,
        "hf://LiquidAI/LFM2.5-230M"),
    "lfm2.5_350m": Size("LFM2.5",   1024, 16, BLOCKS_16, 16,  4_608,   354_483_968,
        "hf://LiquidAI/LFM2.5-350M"),
    "lfm2.5_1.2b": Size("LFM2.5",   2048, 16, BLOCKS_16, 32,  8_192, 1_170_340_608,
        "hf://LiquidAI/LFM2.5-1.2B-Instruct"),
    "lfm2.5_2.6b": Size("LFM2.5",   2048, 30, BLOCKS_30, 32, 10_752, 2_697_198_592,
        "hf://LiquidAI/LFM2.5-2.6B", vocabulary_size=128_000, rope_max_wavelength=10_000_000.0),
}  # fmt: skip
