"""Sizes of HypeNet and MiniCPM-SALA, hybrids of Lightning Attention and softmax attention.

HypeNet: Chen et al. 2026, arXiv:2601.22156, and the configurations of
https://github.com/thunlp/hybrid-linear-attention (Apache-2.0), whose weights are listed in the
collection https://huggingface.co/collections/chen-yingfa/hypenet. The preset of a size is without
its weights: `from_preset("hf://owner/repository")` loads them. MiniCPM-SALA: MiniCPM Team 2026,
arXiv:2602.11761, and https://huggingface.co/openbmb/MiniCPM-SALA (Apache-2.0).

A row is one preset. `parameters` is the resulting number, which a test verifies. A name is the
publication's label, not a count.
"""

from typing import NamedTuple

from keras_recurrent.presets import describe_language_model

GLOBAL, LIGHTNING = "global_attention", "lightning_attention"


class Size(NamedTuple):
    """One row of the table."""

    label: str
    hidden_dim: int  # D
    num_layers: int
    attention: tuple[int, ...]  # indices of the blocks of softmax attention
    heads: int  # query heads, in both kinds of blocks
    key_value_heads: int  # in softmax attention
    head_dim: int
    intermediate_dim: int
    vocabulary_size: int
    tied: bool  # True if the logits use the weights of the embedding
    parameters: int
    license: str | None = None  # of the weights
    weights: str | None = None  # address of published weights
    rope_max_wavelength: float = 1_000_000.0
    further: tuple[tuple[str, object], ...] = ()  # other arguments of the backbone
    sequence_length: int = 1024  # tokens per sequence in the preprocessor

    @property
    def description(self):
        return describe_language_model(self.label, self)

    @property
    def backbone_arguments(self):
        indices = range(self.num_layers)
        return {
            "vocabulary_size": self.vocabulary_size,
            "num_layers": self.num_layers,
            "hidden_dim": self.hidden_dim,
            "intermediate_dim": self.intermediate_dim,
            "block_types": tuple(GLOBAL if i in self.attention else LIGHTNING for i in indices),
            "num_query_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "num_lightning_heads": self.heads,
            "num_lightning_key_value_heads": self.heads,
            "lightning_head_dim": self.head_dim,
            "lightning_query_scale": self.head_dim**-0.5,
            "rope_max_wavelength": self.rope_max_wavelength,
            "tie_word_embeddings": self.tied,
            **dict(self.further),
        }

    @property
    def preprocessor_arguments(self):
        return {"sequence_length": self.sequence_length}


MINICPM_SALA = {
    "use_qk_norm": False,
    "embedding_scale": 12.0,
    "residual_scale": 1.4 / 32**0.5,
    "output_scale": 256 / 4096,
    "dense_length": 8192,
}

SIZES = {
    "hypenet_tiny": Size(
        label="HypeNet",
        hidden_dim=128,
        num_layers=4,
        attention=(2,),
        heads=4,
        key_value_heads=2,
        head_dim=32,
        intermediate_dim=352,
        vocabulary_size=259,
        tied=True,
        parameters=886_912,
    ),
    "hypenet_2b": Size(
        label="HypeNet",
        hidden_dim=2048,
        num_layers=28,
        attention=(2, 3, 6, 8, 9, 21, 25),
        heads=16,
        key_value_heads=8,
        head_dim=128,
        intermediate_dim=6144,
        vocabulary_size=151_936,
        tied=True,
        parameters=1_926_138_880,
    ),
    "hypenet_5b": Size(
        label="HypeNet",
        hidden_dim=2560,
        num_layers=36,
        attention=(0, 1, 7, 14, 15, 22, 24, 31, 33),
        heads=32,
        key_value_heads=8,
        head_dim=128,
        intermediate_dim=9728,
        vocabulary_size=151_936,
        tied=True,
        parameters=4_824_739_328,
    ),
    "hypenet_9b": Size(
        label="HypeNet",
        hidden_dim=4096,
        num_layers=36,
        attention=(1, 2, 4, 6, 7, 10, 24, 33, 34),
        heads=32,
        key_value_heads=8,
        head_dim=128,
        intermediate_dim=12_288,
        vocabulary_size=151_936,
        tied=True,
        parameters=8_851_973_120,
    ),
    "minicpm_sala": Size(
        label="MiniCPM-SALA",
        hidden_dim=4096,
        num_layers=32,
        attention=(0, 9, 16, 17, 22, 29, 30, 31),
        heads=32,
        key_value_heads=2,
        head_dim=128,
        intermediate_dim=16_384,
        vocabulary_size=73_448,
        tied=False,
        parameters=9_477_203_968,
        license="Apache-2.0",
        weights="hf://openbmb/MiniCPM-SALA",
        rope_max_wavelength=10_000.0,
        further=tuple(MINICPM_SALA.items()),
    ),
}
