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

from keras_recurrent.presets import language_model

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
    arguments: dict  # of the backbone
    sequence_length: int = 1024  # tokens per sequence in the preprocessor
    is_gemma: bool = False
    chat_template: str | None = None  # if the checkpoint has none

    def shrink(self, **arguments):
        """Returns the kind with smaller heads and shorter sequences."""
        arguments = {**self.arguments, "head_dim": 32, **arguments}
        return self._replace(arguments=arguments, sequence_length=256)


def size(kind, width, lru_width, depth, expansion, heads, vocabulary, parameters, weights=None):
    """Returns a `Preset` with arguments for all block types, so that users can change the types."""
    arguments = {
        "vocabulary_size": vocabulary,
        "num_layers": depth,
        "hidden_dim": width,
        "intermediate_dim": expansion * width,
        "lru_width": lru_width,
        "num_query_heads": heads,
        **kind.arguments,
    }
    if kind.is_gemma:
        arguments |= {"num_blocks": heads, "embedding_scale": embedding_scale(width)}
    return language_model(
        *(kind.label, arguments, parameters, weights),
        sequence_length=kind.sequence_length,
        config_defaults={"window_includes_current_token": False},
        chat_template=kind.chat_template,
    )


HAWK = Kind("Hawk", {"block_types": ("recurrent",)})
PATTERN = {"block_types": ("recurrent", "recurrent", "local_attention")}
GRIFFIN = Kind("Griffin", {**PATTERN, "sliding_window": 1024})
MQA = Kind("Transformer with multi-query attention", {"block_types": ("global_attention",)})
HAWK_TINY, MQA_TINY = HAWK.shrink(), MQA.shrink()
GRIFFIN_TINY = GRIFFIN.shrink(sliding_window=64)
RGEMMA = Kind(
    "RecurrentGemma",
    {
        **PATTERN,
        "sliding_window": 2049,  # "2048" in the files: tokens before the token itself
        "head_dim": 256,
        "partial_rotary_factor": 0.5,
        "final_logit_soft_cap": 30.0,
        "a_initializer": "recurrentgemma",
    },
    is_gemma=True,
)
RGEMMA_IT = RGEMMA._replace(chat_template=RECURRENT_GEMMA_CHAT_TEMPLATE)

SIZES = {
    # name                  kind               D D_rnn depth M heads vocabulary parameters
    "hawk_tiny":            size(HAWK_TINY,     128,  176,  4, 3,  4,     259,        921_088),
    "hawk_100m":            size(HAWK,          768, 1024, 12, 3,  6,  32_000,    118_377_216),
    "hawk_200m":            size(HAWK,         1024, 1536, 12, 3,  8,  32_000,    206_484_480),
    "hawk_400m":            size(HAWK,         1536, 2048, 12, 3, 12,  32_000,    423_925_248),
    "hawk_1.3b":            size(HAWK,         2048, 2560, 24, 3, 16,  32_000,  1_369_761_792),
    "hawk_3b":              size(HAWK,         3072, 4096, 24, 3, 24,  32_000,  3_094_760_448),
    "hawk_7b":              size(HAWK,         4096, 5632, 32, 3, 32,  32_000,  7_307_497_472),
    "griffin_tiny":         size(GRIFFIN_TINY,  128,  176,  4, 3,  4,     259,        888_832),
    "griffin_tiny_text":    size(GRIFFIN_TINY,  128,  176,  6, 3,  4,     259,      1_300_480,
        weights="griffin_tiny_text.weights.h5"),
    "griffin_100m":         size(GRIFFIN,       768, 1024, 12, 3,  6,  32_000,    113_879_808),
    "griffin_200m":         size(GRIFFIN,      1024, 1536, 12, 3,  8,  32_000,    195_806_208),
    "griffin_400m":         size(GRIFFIN,      1536, 2048, 12, 3, 12,  32_000,    404_444_672),
    "griffin_1.3b":         size(GRIFFIN,      2048, 2560, 24, 3, 16,  32_000,  1_308_477_440),
    "griffin_3b":           size(GRIFFIN,      3072, 4096, 24, 3, 24,  32_000,  2_932_952_064),
    "griffin_7b":           size(GRIFFIN,      4096, 5632, 32, 3, 32,  32_000,  6_921_254_912),
    "griffin_14b":          size(GRIFFIN,      5120, 8192, 40, 3, 40,  32_000, 13_927_781_376),
    "mqa_tiny":             size(MQA_TINY,      128,  176,  4, 3,  4,     259,        792_064),
    "mqa_100m":             size(MQA,           768, 1024, 12, 3,  6,  32_000,    104_884_992),
    "mqa_200m":             size(MQA,          1024, 1536, 12, 3,  8,  32_000,    174_449_664),
    "mqa_400m":             size(MQA,          1536, 2048, 12, 3, 12,  32_000,    365_483_520),
    "mqa_1.3b":             size(MQA,          2048, 2560, 24, 3, 16,  32_000,  1_185_908_736),
    "mqa_3b":               size(MQA,          3072, 4096, 24, 3, 24,  32_000,  2_609_335_296),
    "mqa_7b":               size(MQA,          4096, 5632, 32, 3, 32,  32_000,  6_071_521_280),
    "recurrentgemma_2b":    size(RGEMMA,       2560, 2560, 26, 3, 10, 256_000,  2_682_862_080,
        weights="hf://google/recurrentgemma-2b"),
    "recurrentgemma_2b_it": size(RGEMMA_IT,    2560, 2560, 26, 3, 10, 256_000,  2_682_862_080,
        weights="hf://google/recurrentgemma-2b-it"),
    "recurrentgemma_9b":    size(RGEMMA,       4096, 4096, 38, 3, 16, 256_000,  8_579_977_216,
        weights="hf://google/recurrentgemma-9b"),
    "recurrentgemma_9b_it": size(RGEMMA_IT,    4096, 4096, 38, 3, 16, 256_000,  8_579_977_216,
        weights="hf://google/recurrentgemma-9b-it"),
}  # fmt: skip
