"""Sizes of LFM2 and LFM2.5, hybrids of gated short convolutions and attention.

Liquid AI 2025, arXiv:2511.23404, and the published configurations and model cards. The weights have
the license that their authors call LFM Open License v1.0.

A row is one preset. `parameters` is the resulting parameter count, which a test verifies. A name
is the publication's label, not a count.
"""

from keras_recurrent.presets import language_model

CONVOLUTION, ATTENTION = "gated_short_conv", "global_attention"


def size(label, width, depth, attention, heads, mlp_width, parameters, weights=None, **further):
    """Returns a row with blocks of attention at the indices `attention`."""
    arguments = {
        "vocabulary_size": 65_536,
        "num_layers": depth,
        "hidden_dim": width,
        "intermediate_dim": mlp_width,
        "block_types": tuple(ATTENTION if i in attention else CONVOLUTION for i in range(depth)),
        "num_query_heads": heads,
        "num_key_value_heads": 8,
        "rope_max_wavelength": 1_000_000.0,
        "tie_word_embeddings": True,
        **further,
    }
    license = "LFM Open License v1.0" if weights else None
    return language_model(label, arguments, parameters, weights, license)


BLOCKS_14, BLOCKS_16 = (2, 4, 6, 8, 10, 12), (2, 5, 8, 10, 12, 14)
BLOCKS_30 = (2, 5, 9, 13, 17, 21, 24, 27)

SIZES = {
    # name                           D depth attention heads SwiGLU parameters
    "lfm2_tiny": size("LFM2",        128,  4, (2,),  4,   352,       821_952,
        vocabulary_size=259, num_key_value_heads=2, head_dim=32),
    "lfm2_350m": size("LFM2",       1024, 16, BLOCKS_16, 16,  4_608,   354_483_968,
        "hf://LiquidAI/LFM2-350M"),
    "lfm2_700m": size("LFM2",       1536, 16, BLOCKS_16, 24,  6_912,   742_489_344,
        "hf://LiquidAI/LFM2-700M"),
    "lfm2_1.2b": size("LFM2",       2048, 16, BLOCKS_16, 32,  8_192, 1_170_340_608,
        "hf://LiquidAI/LFM2-1.2B"),
    "lfm2_2.6b": size("LFM2",       2048, 30, BLOCKS_30, 32, 10_752, 2_569_272_320,
        "hf://LiquidAI/LFM2-2.6B"),
    "lfm2.5_230m": size("LFM2.5",   1024, 14, BLOCKS_14, 16,  2_560,   229_693_184,
        "hf://LiquidAI/LFM2.5-230M"),
    "lfm2.5_350m": size("LFM2.5",   1024, 16, BLOCKS_16, 16,  4_608,   354_483_968,
        "hf://LiquidAI/LFM2.5-350M"),
    "lfm2.5_1.2b": size("LFM2.5",   2048, 16, BLOCKS_16, 32,  8_192, 1_170_340_608,
        "hf://LiquidAI/LFM2.5-1.2B-Instruct"),
    "lfm2.5_2.6b": size("LFM2.5",   2048, 30, BLOCKS_30, 32, 10_752, 2_697_198_592,
        "hf://LiquidAI/LFM2.5-2.6B", vocabulary_size=128_000, rope_max_wavelength=10_000_000.0),
}  # fmt: skip
