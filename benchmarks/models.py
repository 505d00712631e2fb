"""Builds the models of the benchmarks and their baselines, with random weights."""

import os
import tempfile
from typing import Any

import keras

from benchmarks.peers import is_installed
from keras_recurrent.checkpoints.layout import get_layout
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.presets.griffin import embedding_scale

if keras.config.backend() == "torch":
    import torch

HYBRID = {
    "attention_layers": tuple(range(3, 24, 4)),
    "num_query_heads": 16,
    "num_key_value_heads": 16,
}
SMALL_WIDTH = 256  # of models for CPUs
# RecurrentGemma's architecture, which transformers computes, too.
SMALL_GRIFFIN = {
    "vocabulary_size": 256,
    "num_layers": 6,
    "hidden_dim": SMALL_WIDTH,
    "intermediate_dim": 3 * SMALL_WIDTH,
    "lru_width": SMALL_WIDTH,
    "num_blocks": 4,
    "num_query_heads": 4,
    "head_dim": SMALL_WIDTH // 4,
    "sliding_window": 256,
    "embedding_scale": embedding_scale(SMALL_WIDTH),
    "a_initializer": "griffin",
}
SMALL_TRANSNORMER = {
    "vocabulary_size": 256,
    "num_layers": 2,
    "hidden_dim": SMALL_WIDTH,
    "intermediate_dim": 11 * SMALL_WIDTH // 4,
    "num_heads": 2,
    "head_dim": SMALL_WIDTH // 2,
}
# {name: (preset, arguments of the backbone that differ)}; other names are those of presets.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hgrn2": ("hgrn2_1.3b_100b", {}),
    "hgrn2_hybrid": ("hgrn2_1.3b_100b", HYBRID),
    "hypenet": ("hypenet_2b", {}),
    "recurrentgemma": ("recurrentgemma_2b", {}),
    "griffin_small": ("recurrentgemma_2b", SMALL_GRIFFIN),
    "transnormer_small": ("tnl_tiny", SMALL_TRANSNORMER),
}
MODEL = f"{', '.join(MODELS)}, or a preset"  # help of an argument


def make_model(name, dtype="bfloat16", **sizes):
    """Returns a language model without a preprocessor; `sizes` override those of its preset."""
    preset, differing = MODELS.get(name, (name, {}))
    return RecurrentCausalLM.from_preset(
        preset, load_weights=False, preprocessor=None, dtype=dtype, **{**differing, **sizes}
    )


# --- Baselines on torch ---


def fla_hgrn2(model):
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
    )
    return build_in_bfloat16(HGRN2ForCausalLM, config)


def transformers_gemma(model):
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
    )
    return build_in_bfloat16(transformers.RecurrentGemmaForCausalLM, config)


def transformers_nemotron(model):
    """Builds transformers' Nemotron-H with the sizes of a model, and random weights.

    Its Mamba-2 layers run the kernels of mamba-ssm if it is installed, else plain torch functions.
    """
    import transformers

    config = get_layout(model.backbone).config(model.backbone.get_config())
    config = transformers.NemotronHConfig.from_dict(config)
    return build_in_bfloat16(transformers.NemotronHForCausalLM, config)


def transformers_llama(sizes):
    """Builds transformers' Llama with the sizes of `GriffinBackbone`, and random weights."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=sizes["num_layers"],
        vocab_size=sizes["vocabulary_size"],
        hidden_size=sizes["hidden_dim"],
        num_attention_heads=sizes["num_query_heads"],
        num_key_value_heads=sizes["num_key_value_heads"],
        intermediate_size=sizes["intermediate_dim"],
        attn_implementation="sdpa",
    )
    return build_in_bfloat16(transformers.LlamaForCausalLM, config)


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


# {name of a model: (library, its module, function that builds the baseline from our model)}
BASELINES: dict[str, tuple] = {
    "hgrn2": ("flash-linear-attention", "fla", fla_hgrn2),
    "recurrentgemma": ("transformers", "transformers", transformers_gemma),
    "griffin_small": ("transformers", "transformers", transformers_copy),
    "nemotron_3_nano_4b": (
        f"transformers, {'mamba-ssm' if is_installed('mamba_ssm') else 'plain torch functions'}",
        *("transformers", transformers_nemotron),
    ),
}
