"""Sizes of the Griffin family.

Hawk, Griffin and the MQA Transformer: De et al. 2024, arXiv:2402.19427, appendix C.
RecurrentGemma: Botev et al. 2024, arXiv:2404.07839, and the published configurations.

A row is one preset. `expansion` is the paper's M: the width of the gated MLP is M * hidden_dim.
`heads` is the number of query heads; all share one key and value head. The paper does not specify
the vocabulary: 32,000 tokens here, with tied embeddings. `parameters` is the resulting number,
which a test verifies. A name is the paper's label, not a count.
"""

from typing import NamedTuple

import ml_dtypes

from keras_recurrent.presets import describe_language_model

# Of the instruction-tuned RecurrentGemma models, in the format of their model cards.
RECURRENT_GEMMA_CHAT_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ("user", "assistant") %}
        {{- raise_exception("The role must be user or assistant; got " ~ message.role) }}
    {%- endif %}
    {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("The roles must alternate, from user to assistant") }}
    {%- endif %}
    {%- set role = "user" if message.role == "user" else "model" %}
    {{- "<start_of_turn>" ~ role ~ "\\n" ~ message.content | trim ~ "<end_of_turn>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<start_of_turn>model\\n" }}
{%- endif %}"""


def embedding_scale(hidden_dim):
    """sqrt(D) rounded to bfloat16, as RecurrentGemma was trained."""
    return float(ml_dtypes.bfloat16(hidden_dim**0.5))


class Kind(NamedTuple):
    """Properties shared by several rows."""

    label: str
    block_types: tuple[str, ...]  # repeated and truncated to num_layers
    sliding_window: int | None = None  # tokens that a token attends to, itself included
    head_dim: int = 128
    num_blocks: int | None = 16  # blocks of the block-diagonal gates; None: as many as heads
    partial_rotary_factor: float = 1.0
    scaled_embeddings: bool = False
    final_logit_soft_cap: float | None = None
    a_initializer: str = "griffin"
    sequence_length: int = 1024  # tokens per sequence in the preprocessor
    chat_template: str | None = None  # if the checkpoint has none


class Size(NamedTuple):
    """One row of the table."""

    kind: Kind
    hidden_dim: int  # D
    lru_width: int  # D_rnn, near 4 D / 3
    num_layers: int
    expansion: int  # M
    heads: int
    vocabulary_size: int
    parameters: int
    weights: str | None = None  # address or file, if available

    @property
    def config_defaults(self):
        """Keys that `config.json` of the published weights lacks."""
        return {"window_includes_current_token": False}

    @property
    def description(self):
        return describe_language_model(self.kind.label, self)

    @property
    def backbone_arguments(self):
        """Arguments for all block types, so that another pattern needs one override."""
        kind = self.kind
        return {
            "vocabulary_size": self.vocabulary_size,
            "num_layers": self.num_layers,
            "hidden_dim": self.hidden_dim,
            "intermediate_dim": self.expansion * self.hidden_dim,
            "lru_width": self.lru_width,
            "num_blocks": kind.num_blocks or self.heads,
            "block_types": kind.block_types,
            "num_query_heads": self.heads,
            "head_dim": kind.head_dim,
            "sliding_window": kind.sliding_window,
            "partial_rotary_factor": kind.partial_rotary_factor,
            "embedding_scale": embedding_scale(self.hidden_dim) if kind.scaled_embeddings else None,
            "final_logit_soft_cap": kind.final_logit_soft_cap,
            "a_initializer": kind.a_initializer,
        }

    @property
    def preprocessor_arguments(self):
        return {"sequence_length": self.kind.sequence_length}

    @property
    def chat_template(self):
        return self.kind.chat_template


HAWK = Kind("Hawk", ("recurrent",))
GRIFFIN = Kind("Griffin", ("recurrent", "recurrent", "local_attention"), sliding_window=1024)
MQA = Kind("Transformer with multi-query attention", ("global_attention",))
HAWK_TINY = HAWK._replace(head_dim=32, sequence_length=256)
GRIFFIN_TINY = GRIFFIN._replace(head_dim=32, sequence_length=256, sliding_window=64)
MQA_TINY = MQA._replace(head_dim=32, sequence_length=256)
RGEMMA = Kind(
    "RecurrentGemma",
    GRIFFIN.block_types,
    sliding_window=2049,  # "2048" in the files: tokens before the token itself
    head_dim=256,
    num_blocks=None,
    partial_rotary_factor=0.5,
    scaled_embeddings=True,
    final_logit_soft_cap=30.0,
    a_initializer="recurrentgemma",
)
RGEMMA_IT = RGEMMA._replace(chat_template=RECURRENT_GEMMA_CHAT_TEMPLATE)

SIZES = {
    # name                  kind               D D_rnn depth M heads vocabulary parameters
    "hawk_tiny":            Size(HAWK_TINY,     128,  176,  4, 3,  4,     259,        921_088),
    "hawk_100m":            Size(HAWK,          768, 1024, 12, 3,  6,  32_000,    118_377_216),
    "hawk_200m":            Size(HAWK,         1024, 1536, 12, 3,  8,  32_000,    206_484_480),
    "hawk_400m":            Size(HAWK,         1536, 2048, 12, 3, 12,  32_000,    423_925_248),
    "hawk_1.3b":            Size(HAWK,         2048, 2560, 24, 3, 16,  32_000,  1_369_761_792),
    "hawk_3b":              Size(HAWK,         3072, 4096, 24, 3, 24,  32_000,  3_094_760_448),
    "hawk_7b":              Size(HAWK,         4096, 5632, 32, 3, 32,  32_000,  7_307_497_472),
    "griffin_tiny":         Size(GRIFFIN_TINY,  128,  176,  4, 3,  4,     259,        888_832),
    "griffin_tiny_text":    Size(GRIFFIN_TINY,  128,  176,  6, 3,  4,     259,      1_300_480,
        weights="griffin_tiny_text.weights.h5"),
    "griffin_100m":         Size(GRIFFIN,       768, 1024, 12, 3,  6,  32_000,    113_879_808),
    "griffin_200m":         Size(GRIFFIN,      1024, 1536, 12, 3,  8,  32_000,    195_806_208),
    "griffin_400m":         Size(GRIFFIN,      1536, 2048, 12, 3, 12,  32_000,    404_444_672),
    "griffin_1.3b":         Size(GRIFFIN,      2048, 2560, 24, 3, 16,  32_000,  1_308_477_440),
    "griffin_3b":           Size(GRIFFIN,      3072, 4096, 24, 3, 24,  32_000,  2_932_952_064),
    "griffin_7b":           Size(GRIFFIN,      4096, 5632, 32, 3, 32,  32_000,  6_921_254_912),
    "griffin_14b":          Size(GRIFFIN,      5120, 8192, 40, 3, 40,  32_000, 13_927_781_376),
    "mqa_tiny":             Size(MQA_TINY,      128,  176,  4, 3,  4,     259,        792_064),
    "mqa_100m":             Size(MQA,           768, 1024, 12, 3,  6,  32_000,    104_884_992),
    "mqa_200m":             Size(MQA,          1024, 1536, 12, 3,  8,  32_000,    174_449_664),
    "mqa_400m":             Size(MQA,          1536, 2048, 12, 3, 12,  32_000,    365_483_520),
    "mqa_1.3b":             Size(MQA,          2048, 2560, 24, 3, 16,  32_000,  1_185_908_736),
    "mqa_3b":               Size(MQA,          3072, 4096, 24, 3, 24,  32_000,  2_609_335_296),
    "mqa_7b":               Size(MQA,          4096, 5632, 32, 3, 32,  32_000,  6_071_521_280),
    "recurrentgemma_2b":    Size(RGEMMA,       2560, 2560, 26, 3, 10, 256_000,  2_682_862_080,
        weights="hf://google/recurrentgemma-2b"),
    "recurrentgemma_2b_it": Size(RGEMMA_IT,    2560, 2560, 26, 3, 10, 256_000,  2_682_862_080,
        weights="hf://google/recurrentgemma-2b-it"),
    "recurrentgemma_9b":    Size(RGEMMA,       4096, 4096, 38, 3, 16, 256_000,  8_579_977_216,
        weights="hf://google/recurrentgemma-9b"),
    "recurrentgemma_9b_it": Size(RGEMMA_IT,    4096, 4096, 38, 3, 16, 256_000,  8_579_977_216,
        weights="hf://google/recurrentgemma-9b-it"),
}  # fmt: skip
