"""Sizes of the Griffin family: De et al. 2024, arXiv:2402.19427, appendix C.

A row is one preset. `expansion` is the paper's M: the gated MLP is M * hidden_dim wide. `heads`
is printed for the models that attend; Hawk does not. The paper leaves the vocabulary open: 32,000
tokens here, tied. `parameters` is what that makes, and what a test counts. A name is the paper's
label, not a count. No row has published weights.
"""

from typing import NamedTuple


class Size(NamedTuple):
    """One row of the table."""

    hidden_dim: int  # D
    lru_width: int  # D_rnn, near 4 D / 3
    num_layers: int
    expansion: int  # M
    heads: int
    vocabulary_size: int
    parameters: int
    block_types: tuple[str, ...] = ("recurrent",)  # repeated, and cut at num_layers
    num_blocks: int = 16  # blocks of the block-diagonal gates
    sequence_length: int = 1024  # tokens a row of the preprocessor


SIZES = {
    # name               D  D_rnn depth  M heads vocabulary     parameters
    "hawk_tiny": Size( 128,   176,    4, 3,    1,       259,       921_088, sequence_length=256),
    "hawk_100m": Size( 768,  1024,   12, 3,    6,    32_000,   118_377_216),
    "hawk_200m": Size(1024,  1536,   12, 3,    8,    32_000,   206_484_480),
    "hawk_400m": Size(1536,  2048,   12, 3,   12,    32_000,   423_925_248),
    "hawk_1.3b": Size(2048,  2560,   24, 3,   16,    32_000, 1_369_761_792),
    "hawk_3b":   Size(3072,  4096,   24, 3,   24,    32_000, 3_094_760_448),
    "hawk_7b":   Size(4096,  5632,   32, 3,   32,    32_000, 7_307_497_472),
}  # fmt: skip
