"""Builds the models of the benchmarks and their baselines, with random weights."""

import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_recurrent.models import (
    GriffinBackbone,
    GriffinCausalLM,
    HGRN2CausalLM,
    LightningHybridCausalLM,
    TransNormerBackbone,
    TransNormerCausalLM,
)
from keras_recurrent.presets.griffin import embedding_scale

if keras.config.backend() == "torch":
    import torch

SMALL_WIDTH, VOCABULARY = 256, 256  # of small models, for CPUs


class Baseline(NamedTuple):
    """A model of another library with the same sizes, on torch.

    Attributes:
        library: name of the package.
        module: name of its module.
        make: function that builds it from this package's model.
    """

    library: str
    module: str
    make: Callable


class Model(NamedTuple):
    """A model of this package.

    Attributes:
        family: class of the language model.
        preset: name of the preset, or the backbone.
        sizes: arguments of the backbone that differ from the preset.
        baseline: its `Baseline`, or None.
    """

    family: Any
    preset: Any
    sizes: dict = {}
    baseline: Any = None


def small_griffin():
    """Builds Griffin with RecurrentGemma's architecture, which transformers computes, too."""
    return GriffinBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=6,
        hidden_dim=SMALL_WIDTH,
        intermediate_dim=3 * SMALL_WIDTH,
        lru_width=SMALL_WIDTH,
        num_blocks=4,
        block_types=("recurrent", "recurrent", "local_attention"),
        num_query_heads=4,
        head_dim=SMALL_WIDTH // 4,
        sliding_window=256,
        partial_rotary_factor=0.5,
        embedding_scale=embedding_scale(SMALL_WIDTH),
        final_logit_soft_cap=30.0,
    )


def small_transnormer():
    return TransNormerBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        hidden_dim=SMALL_WIDTH,
        intermediate_dim=11 * SMALL_WIDTH // 4,
        num_heads=2,
        head_dim=SMALL_WIDTH // 2,
    )


def make_model(name, dtype="bfloat16", preprocessor=None, **sizes):
    """Returns a model of `MODELS`; `sizes` override those of its preset."""
    model = MODELS[name]
    if callable(model.preset):
        return model.family(model.preset())
    options = {"load_weights": False, "preprocessor": preprocessor, "dtype": dtype}
    return model.family.from_preset(model.preset, **options, **{**model.sizes, **sizes})


# --- Baselines on torch ---


def fla_hgrn2(model, use_cache=False):
    """Builds flash-linear-attention's HGRN2 with the sizes of a model, and random weights."""
    from fla.models import HGRN2Config, HGRN2ForCausalLM

    sizes = model.backbone.get_config()
    config = HGRN2Config(
        hidden_size=sizes["hidden_dim"],
        num_hidden_layers=sizes["num_layers"],
        expand_ratio=sizes["expand_ratio"],
        intermediate_size=sizes["intermediate_dim"],
        vocab_size=sizes["vocabulary_size"],
        tie_word_embeddings=False,
        use_cache=use_cache,
    )
    return build_in_bfloat16(HGRN2ForCausalLM, config)


def transformers_gemma(model, use_cache=False):
    """Builds transformers' RecurrentGemma with the sizes of a model, and random weights."""
    import transformers

    sizes = model.backbone.get_config()
    config = transformers.RecurrentGemmaConfig(
        num_hidden_layers=sizes["num_layers"],
        vocab_size=sizes["vocabulary_size"],
        hidden_size=sizes["hidden_dim"],
        lru_width=sizes["lru_width"],
        num_attention_heads=sizes["num_query_heads"],
        num_key_value_heads=sizes["num_key_value_heads"],
        intermediate_size=2 * sizes["intermediate_dim"],
        attention_window_size=sizes["sliding_window"],
        use_cache=use_cache,
    )
    return build_in_bfloat16(transformers.RecurrentGemmaForCausalLM, config)


def build_in_bfloat16(family, config):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):  # billions of random numbers, which are slow on a CPU
        model = family(config)
    return model.to(device, torch.bfloat16)


def transformers_copy(model):
    """Builds the transformers model with the weights of a model."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint")
        model.export_to_transformers(path)
        return transformers.AutoModelForCausalLM.from_pretrained(path)


HYBRID = {
    "attention_layers": tuple(range(3, 24, 4)),
    "num_query_heads": 16,
    "num_key_value_heads": 16,
}
FLA = Baseline("flash-linear-attention", "fla", fla_hgrn2)
GEMMA = Baseline("transformers", "transformers", transformers_gemma)
GEMMA_COPY = Baseline("transformers", "transformers", transformers_copy)
MODELS: dict[str, Model] = {
    "hgrn2": Model(HGRN2CausalLM, "hgrn2_1.3b_100b", baseline=FLA),
    "hgrn2_hybrid": Model(HGRN2CausalLM, "hgrn2_1.3b_100b", HYBRID),
    "hypenet": Model(LightningHybridCausalLM, "hypenet_2b"),
    "minicpm_sala": Model(LightningHybridCausalLM, "minicpm_sala"),
    "recurrentgemma": Model(GriffinCausalLM, "recurrentgemma_2b", baseline=GEMMA),
    # For CPUs.
    "griffin_small": Model(GriffinCausalLM, small_griffin, baseline=GEMMA_COPY),
    "transnormer_small": Model(TransNormerCausalLM, small_transnormer),
    "griffin_100m": Model(GriffinCausalLM, "griffin_100m"),
    "hawk_tiny": Model(GriffinCausalLM, "hawk_tiny"),
}
