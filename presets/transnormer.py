"""Sizes of TransNormerLLM.

Qin et al. 2023, arXiv:2307.14995, and 2024, arXiv:2405.17381. The paper's tables omit the depth
of 1B and 7B and the width of the SGLU from 1B on: these are derived from parameter counts, as are
all sizes of 44M (WikiText-103). The paper states a vocabulary of about 100,000 for 15B. Where
weights are published, sizes are read from their files.

A row is one preset. The size of a head is `hidden_dim / heads`. `parameters` is the resulting
number, which a test verifies. A name is the paper's label, not a count.
"""

from keras_recurrent.presets import language_model


def size(width, depth, heads, mlp_width, vocabulary, tied, tokens, parameters, weights=None):
    arguments = {
        "vocabulary_size": vocabulary,
        "num_layers": depth,
        "hidden_dim": width,
        "intermediate_dim": mlp_width,
        "num_heads": heads,
        "head_dim": width // heads,
        "tie_word_embeddings": tied,
    }
    return language_model("TransNormerLLM", arguments, parameters, weights, sequence_length=tokens)


SIZES = {
    # name          D  depth heads   SGLU vocabulary   tied  tokens      parameters
    "tnl_tiny": size( 128,  4,  4,    352,     259, False,  256,        934_784),
    "tnl_44m":  size( 512,  6,  8,  1_152,  50_265,  True,  512,     44_217_344),
    "tnl_385m": size(1024, 24,  8,  2_816,  64_000, False, 1024,    464_520_192,
        weights="hf://OpenNLPLab/TransNormerLLM-385M"),
    "tnl_1b":   size(2048, 16, 16,  5_632,  64_000, False, 1024,  1_151_338_496,
        weights="hf://OpenNLPLab/TransNormerLLM-1B"),
    "tnl_7b":   size(4096, 30, 32, 11_264,  64_000, False, 1024,  7_193_235_456,
        weights="hf://OpenNLPLab/TransNormerLLM-7B"),
    "tnl_15b":  size(5120, 42, 40, 13_824, 100_000, False, 1024, 15_447_168_000),
}  # fmt: skip
