"""A model of a few thousand weights for each family, with equal weights on every backend.

Tests marked `any_family` run for each row of `FAMILIES`. Tests marked `shared_by_families` are
about code that all families share: they run for every family on torch, which compiles nothing, and
for one family each on JAX and TensorFlow, which compile each model for most of a minute.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

from keras_recurrent import models

VOCABULARY = 61


class Family(NamedTuple):
    backbone: type
    causal_lm: type
    preprocessor: type
    tokenizer: type
    sizes: dict[str, Any]  # arguments of the backbone


def make_family(name, **sizes):
    """The classes of a family, whose names begin with `name`, and sizes."""
    parts = ("Backbone", "CausalLM", "CausalLMPreprocessor", "Tokenizer")
    classes = [getattr(models, f"{name}{part}") for part in parts]
    return Family(*classes, {"vocabulary_size": VOCABULARY, "hidden_dim": 16, **sizes})


ATTENTION = {"num_query_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    # One block of every type, so that tests of models cover all blocks.
    "griffin": make_family(
        "Griffin",
        num_layers=3,
        intermediate_dim=40,
        lru_width=24,
        num_blocks=4,
        block_types=("recurrent", "local_attention", "global_attention"),
        **ATTENTION,
        head_dim=8,
        sliding_window=4,
        partial_rotary_factor=0.5,
    ),
    "hgrn2": make_family("HGRN2", num_layers=2, intermediate_dim=20, expand_ratio=4),
    "transnormer": make_family(
        "TransNormer", num_layers=2, intermediate_dim=24, num_heads=3, head_dim=4
    ),
    # The options of MiniCPM-SALA, with grouped heads in both kinds of blocks.
    "lightning_hybrid": make_family(
        "LightningHybrid",
        num_layers=2,
        intermediate_dim=24,
        block_types=("lightning_attention", "global_attention"),
        **ATTENTION,
        head_dim=4,
        num_lightning_key_value_heads=2,
        lightning_query_scale=0.5,
        use_qk_norm=False,
        embedding_scale=3.0,
        residual_scale=0.7,
        output_scale=0.5,
    ),
    # A layer of each kind in the first two blocks, with all factors.
    "mamba_hybrid": make_family(
        "MambaHybrid",
        num_layers=3,
        intermediate_dim=24,
        block_types=("mamba_and_attention", "mlp", "mamba"),
        mlp="swiglu",
        num_mamba_heads=4,
        mamba_head_dim=3,
        mamba_state_dim=5,
        num_mamba_groups=2,
        mamba_conv_size=3,
        mamba_projection_scales=(0.5, 1.5, 1.2, 0.8, 1.1),
        **ATTENTION,
        head_dim=4,
        rope_max_wavelength=100.0,
        query_scale=0.4,
        embedding_scale=3.0,
        output_scale=1.5,
        mamba_scale=0.7,
        attention_scale=0.8,
        mlp_scale=0.9,
        mlp_gate_scale=1.2,
    ),
    "lfm2": make_family(
        "LFM2",
        num_layers=2,
        intermediate_dim=24,
        block_types=("gated_short_conv", "global_attention"),
        **ATTENTION,
        head_dim=4,
        use_conv_bias=True,
        rope_max_wavelength=100.0,
    ),
}
SIZES = FAMILIES["griffin"].sizes
# Further arguments of a tiny "hgrn2": attention between two HGRN2 blocks, the second with a bound.
HYBRID = {
    "num_layers": 3,
    "attention_layers": (1,),
    **ATTENTION,
    "rope_max_wavelength": 100.0,
    "use_qkv_bias": True,
}

any_family = pytest.mark.parametrize("family", FAMILIES)
SHARED = {"jax": ["hgrn2"], "tensorflow": ["transnormer"], "torch": list(FAMILIES)}
SHARED = SHARED[keras.backend.backend()]
shared_by_families = pytest.mark.parametrize("family", SHARED)
# Costly tests of shared code: a family with attention and one without, on torch.
two_families = pytest.mark.parametrize("family", SHARED[:2])
# Where XLA compiles each model, costly tests with additional models are nightly.
NIGHTLY_IF_COMPILED = () if keras.backend.backend() == "torch" else (pytest.mark.nightly,)
nightly_on_tensorflow = (
    pytest.mark.nightly if keras.backend.backend() == "tensorflow" else lambda test: test
)
# XLA's compile time grows with the number of layers: tests of code around layers use these sizes.
FEWER_LAYERS = {} if keras.backend.backend() == "torch" else {"num_layers": 1}


def tiny_backbone(seed=0, family="griffin", **kwargs):
    """A backbone with weights from NumPy, large enough that logits differ by more than rounding."""
    cls, sizes = FAMILIES[family].backbone, FAMILIES[family].sizes
    backbone = cls(**{**sizes, **kwargs})
    set_weights(backbone, seed)
    return backbone


def tiny_causal_lm(seed=0, preprocessor=None, family="griffin", **kwargs):
    return FAMILIES[family].causal_lm(tiny_backbone(seed, family, **kwargs), preprocessor)


def tiny_text_model(family="griffin", preprocessor=None, **kwargs):
    """A causal LM on bytes; `preprocessor` holds arguments of its preprocessor."""
    cls, options = FAMILIES[family], {"sequence_length": 8, **(preprocessor or {})}
    made = cls.preprocessor(cls.tokenizer(), **options)
    return tiny_causal_lm(0, made, family, **{"vocabulary_size": 259, **kwargs})


def set_weights(model, seed):
    """Draws each weight from NumPy, by its path."""
    rng = np.random.default_rng(seed)
    for weight in sorted(model.weights, key=lambda w: w.path):
        weight.assign(draw(rng, weight.path, weight.shape))


def draw(rng, path, shape):
    noise = rng.normal(size=shape)
    if path.endswith("embeddings"):
        return noise
    if path.endswith("a_logit"):
        return 2.0 + noise  # decays over a few to a hundred tokens
    if path.endswith("dt_bias"):
        return noise - 1.0  # decays over a few tokens
    if path.endswith(("bias", "scale", "cg_lru/theta", "a_log", "skip")):
        return 0.3 * noise
    return noise / np.sqrt(shape[-2])


def training_batch(batch=2, length=8, seed=0):
    """Random sequences without padding, and the next token of each token."""
    token_ids = np.random.default_rng(seed).integers(3, VOCABULARY, (batch, length + 1), "int32")
    x = {"token_ids": token_ids[:, :-1], "padding_mask": np.ones((batch, length), "int32")}
    return x, token_ids[:, 1:]


def weights_of(model):
    return {weight.path: keras.ops.convert_to_numpy(weight) for weight in model.weights}


def forward(model, token_ids, real):
    """Logits of a forward pass over whole sequences."""
    x = {"token_ids": np.asarray(token_ids, "int32"), "padding_mask": np.asarray(real, "int32")}
    return keras.ops.convert_to_numpy(model.predict_on_batch(x)).astype("float32")
