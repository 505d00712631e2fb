"""Sizes of Nemotron-H, Granite 4.0 H, Falcon-H1 and Mamba-2.

- Nemotron-H: NVIDIA 2025, arXiv:2504.03624, and https://huggingface.co/nvidia.
- Granite 4.0 H, dense: IBM 2025, https://huggingface.co/ibm-granite.
- Falcon-H1: Falcon LLM Team 2025, arXiv:2507.22448, and https://huggingface.co/tiiuae.
- Mamba-2: Dao and Gu 2024, arXiv:2405.21060, and Mistral's Mamba-Codestral.

A row is one preset. `parameters` is the resulting parameter count, which a test verifies. Licenses
are named as their authors name them. The weights of the Mamba-2 paper are pickled, in another
layout, so the presets of that paper have no weights.
"""

from keras_recurrent.presets import language_model

CHARACTERS = {"M": "mamba", "*": "attention", "-": "mlp"}


def nemotron(pattern, width, mlp_width, mamba_heads, attention_heads, **arguments):
    """Returns the arguments of a Nemotron-H with blocks of the types in `pattern`.

    `mamba_heads` are the number and the size of Mamba-2 heads, and `attention_heads` the number of
    query heads and of key and value heads.
    """
    return {
        "vocabulary_size": 131_072,
        "num_layers": len(pattern),
        "hidden_dim": width,
        "intermediate_dim": mlp_width,
        "block_types": tuple(CHARACTERS[character] for character in pattern),
        "num_mamba_heads": mamba_heads[0],
        "mamba_head_dim": mamba_heads[1],
        "num_mamba_groups": 8,
        "num_query_heads": attention_heads[0],
        "num_key_value_heads": attention_heads[1],
        **arguments,
    }


def granite(depth, attention, width, mlp_width, mamba_head_dim, heads, scales):
    """Returns the arguments of a Granite 4.0 H with attention blocks at the indices `attention`.

    `heads` are the numbers of Mamba-2 heads, of query heads, and of key and value heads, and the
    size of a head of attention. `scales` are the multiplier of residuals and the divisor of logits.
    """
    mamba_heads, query_heads, key_value_heads, head_dim = heads
    residual, logits = scales
    return {
        "vocabulary_size": 100_352,
        "num_layers": depth,
        "hidden_dim": width,
        "intermediate_dim": mlp_width,
        "block_types": tuple("attention" if i in attention else "mamba" for i in range(depth)),
        "use_mlp": True,
        "mlp": "swiglu",
        "num_mamba_heads": mamba_heads,
        "mamba_head_dim": mamba_head_dim,
        "num_query_heads": query_heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "query_scale": 1 / head_dim,
        "embedding_scale": 12.0,
        "output_scale": 1 / logits,
        "mamba_scale": residual,
        "attention_scale": residual,
        "mlp_scale": residual,
        "tie_word_embeddings": True,
    }


def falcon(depth, width, mlp_width, mamba_head_dim, state_dim, **arguments):
    """Returns the arguments of a Falcon-H1 with 24 Mamba-2 heads and 8 query heads."""
    return {
        "num_layers": depth,
        "hidden_dim": width,
        "intermediate_dim": mlp_width,
        "block_types": ("mamba_and_attention",) * depth,
        "use_mlp": True,
        "mlp": "swiglu",
        "num_mamba_heads": 24,
        "mamba_head_dim": mamba_head_dim,
        "mamba_state_dim": state_dim,
        "mamba_norm_position": None,
        "num_query_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_max_wavelength": 1e11,
        **arguments,
    }


def mamba2(depth, width, **arguments):
    """Returns the arguments of a Mamba-2 with heads of 64 channels."""
    return {
        "vocabulary_size": 50_288,
        "num_layers": depth,
        "hidden_dim": width,
        "block_types": ("mamba",) * depth,
        "num_mamba_heads": width // 32,
        "tie_word_embeddings": True,
        **arguments,
    }


APACHE, FALCON = "Apache-2.0", "Falcon-LLM License"
NVIDIA_OPEN, NEMOTRON = "NVIDIA Open Model License Agreement", "NVIDIA Nemotron Open Model License"
TINY = {"vocabulary_size": 259, "num_mamba_groups": 2, "mamba_state_dim": 32, "head_dim": 32}
FALCON_TINY = {
    "vocabulary_size": 32_768,
    "embedding_scale": 0.1108,
    "output_scale": 0.078125,
    "tie_word_embeddings": True,
}
FALCON_0_5B = {
    "vocabulary_size": 32_784,
    "query_scale": 0.390625 / 8,
    "embedding_scale": 5.656854249492381,
    "output_scale": 0.0390625,
    "mamba_projection_scales": tuple(1.25 * s for s in (0.5**1.5, 0.25, 0.5**1.5, 0.5, 0.5**1.5)),
    "mamba_scale": 0.2357022603955158,
    "attention_scale": 0.9375,
    "mlp_gate_scale": 0.8838834764831844,
    "mlp_scale": 0.5859375,
}
CODESTRAL = {"vocabulary_size": 32_768, "num_mamba_groups": 8, "tie_word_embeddings": False}

SIZES = {
    # name: label, pattern or depth and sizes, parameters, weights, license
    "nemotron_h_tiny": language_model("Nemotron-H",
        nemotron("M-M-*-", 128, 512, (8, 32), (4, 2), **TINY), 745_392),
    "nemotron_3_nano_4b": language_model("Nemotron-3-Nano-4B",
        nemotron("M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-", 3136, 12_544, (96, 80), (40, 8)),
        3_973_556_832, "hf://nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16", NEMOTRON),
    "nemotron_nano_9b_v2": language_model("Nemotron-Nano-9B-v2",
        nemotron("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            4480, 15_680, (128, 80), (40, 8)),
        8_888_227_328, "hf://nvidia/NVIDIA-Nemotron-Nano-9B-v2", NVIDIA_OPEN),
    "nemotron_h_8b": language_model("Nemotron-H-8B-Base-8K",
        nemotron("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            4096, 21_504, (128, 64), (32, 8)),
        8_100_852_736, "hf://nvidia/Nemotron-H-8B-Base-8K"),
    "granite_4.0_h_350m": language_model("Granite 4.0 H 350M",
        granite(32, (10, 13, 17, 27), 768, 2048, 32, (48, 12, 4, 64), (0.246, 3.0)),
        340_332_224, "hf://ibm-granite/granite-4.0-h-350m", APACHE),
    "granite_4.0_h_1b": language_model("Granite 4.0 H 1B",
        granite(40, (5, 15, 25, 35), 1536, 4096, 64, (48, 12, 4, 128), (0.22, 6.0)),
        1_461_538_368, "hf://ibm-granite/granite-4.0-h-1b", APACHE),
    "granite_4.0_h_micro": language_model("Granite 4.0 H Micro",
        granite(40, (5, 15, 25, 35), 2048, 8192, 64, (64, 32, 8, 64), (0.22, 8.0)),
        3_191_396_096, "hf://ibm-granite/granite-4.0-h-micro", APACHE),
    "falcon_h1_tiny_90m": language_model("Falcon-H1-Tiny-90M",
        falcon(24, 512, 768, 32, 64, **FALCON_TINY),
        91_131_072, "hf://tiiuae/Falcon-H1-Tiny-90M-Base", FALCON),
    "falcon_h1_0.5b": language_model("Falcon-H1-0.5B",
        falcon(36, 1024, 2048, 64, 128, **FALCON_0_5B),
        521_411_104, "hf://tiiuae/Falcon-H1-0.5B-Base", FALCON),
    "mamba_codestral_7b": language_model("Mamba-Codestral-7B-v0.1",
        mamba2(64, 4096, **CODESTRAL),
        7_285_403_648, "hf://mistralai/Mamba-Codestral-7B-v0.1", APACHE),
    "mamba2_130m": language_model("Mamba-2", mamba2(24, 768), 128_989_632),
    "mamba2_370m": language_model("Mamba-2", mamba2(48, 1024), 368_346_624),
    "mamba2_780m": language_model("Mamba-2", mamba2(48, 1536), 780_161_280),
    "mamba2_1.3b": language_model("Mamba-2", mamba2(48, 2048), 1_343_757_312),
    "mamba2_2.7b": language_model("Mamba-2", mamba2(64, 2560), 2_702_599_680),
}  # fmt: skip
