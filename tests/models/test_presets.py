"""Presets: names, published sizes, and the arguments that may be given with them."""

import logging
import pathlib

import keras
import keras_hub
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent.checkpoints import loaders
from keras_recurrent.models import (
    GriffinBackbone,
    GriffinCausalLM,
    GriffinCausalLMPreprocessor,
    GriffinTokenizer,
)
from tests.models.tiny import VOCABULARY

pytestmark = pytest.mark.once

# Griffin, appendix C: D, D_rnn, depth and heads; M is 3 throughout.
PAPER = {
    "100m": (768, 1024, 12, 6),
    "200m": (1024, 1536, 12, 8),
    "400m": (1536, 2048, 12, 12),
    "1.3b": (2048, 2560, 24, 16),
    "3b": (3072, 4096, 24, 24),
    "7b": (4096, 5632, 32, 32),
    "14b": (5120, 8192, 40, 40),
}
OURS = {"tiny": (128, 176, 4, 4), "tiny_text": (128, 176, 6, 4)}
GEMMA = {"2b": (2560, 2560, 26, 10), "9b": (4096, 4096, 38, 16)}
PATTERNS = {"hawk": "r", "griffin": "rra", "mqa": "a", "recurrentgemma": "rra"}
NAMES = [
    *(f"hawk_{size}" for size in ("tiny", *PAPER) if size != "14b"),
    *(f"griffin_{size}" for size in (*OURS, *PAPER)),
    *(f"mqa_{size}" for size in ("tiny", *PAPER) if size != "14b"),
    *(f"recurrentgemma_{size}" for size in ("2b", "2b_it", "9b", "9b_it")),
]


def parameters(name):
    """Counted off the paper: section 2 (blocks), 2.4 and appendix A (RG-LRU), C (sizes)."""
    kind, size = name.removesuffix("_it").split("_", 1)
    if kind == "recurrentgemma":
        d, d_rnn, depth, heads = GEMMA[size]
        vocabulary, head, blocks = 256_000, 256, heads
    else:
        d, d_rnn, depth, heads = (PAPER | OURS)[size]
        vocabulary, head, blocks = (259, 32, 16) if size in OURS else (32_000, 128, 16)
    norm, m, taps = d, 3, 4
    gate = blocks * (d_rnn // blocks) ** 2 + d_rnn
    rg_lru = 2 * gate + d_rnn
    convolution = (taps + 1) * d_rnn
    mixers = {
        "r": 2 * (d * d_rnn + d_rnn) + convolution + rg_lru + (d_rnn * d + d),
        "a": d * heads * head + 2 * d * head + (heads * head * d + d),
    }
    mlp = 2 * (d * m * d + m * d) + (m * d * d + d)
    pattern = PATTERNS[kind]
    mixing = sum(mixers[pattern[i % len(pattern)]] for i in range(depth))
    return vocabulary * d + mixing + depth * (2 * norm + mlp) + norm


def count_without_memory(name, cls=GriffinBackbone, **kwargs):
    """Builds a model whose weights have shapes but no values."""
    with keras.StatelessScope(initialize_variables=False):
        model = cls.from_preset(name, **kwargs)
        parameters = sum(int(np.prod(weight.shape)) for weight in model.weights)
    # Keras would still give them values at the end of the next scope.
    keras.utils.clear_session(free_memory=False)
    return parameters


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_parameters_follow_from_the_sizes_in_the_paper(name):
    listed = GriffinCausalLM.presets[name]["metadata"]["params"]
    assert listed == parameters(name)
    assert count_without_memory(name, load_weights=False) == listed


@pytest.mark.once
def test_named_sizes():
    listed = {name: row["metadata"]["params"] for name, row in GriffinCausalLM.presets.items()}
    assert round(listed["hawk_1.3b"] / 1e6, 1) == 1369.8
    assert round(listed["griffin_1.3b"] / 1e6, 1) == 1308.5
    assert round(listed["mqa_1.3b"] / 1e6, 1) == 1185.9
    assert listed["recurrentgemma_2b"] == listed["recurrentgemma_2b_it"] == 2_682_862_080
    assert listed["recurrentgemma_9b"] == listed["recurrentgemma_9b_it"] == 8_579_977_216


@pytest.mark.once
def test_patterns_windows_and_positions():
    def config(name, **kwargs):
        with keras.StatelessScope(initialize_variables=False):
            small = {"num_layers": 3, "vocabulary_size": 300, **kwargs}
            backbone = GriffinBackbone.from_preset(name, load_weights=False, **small)
        keras.utils.clear_session(free_memory=False)
        return backbone.get_config()

    griffin = config("griffin_1.3b")
    assert griffin["block_types"] == ("recurrent", "recurrent", "local_attention")
    assert griffin["sliding_window"] == 1024
    assert griffin["num_query_heads"] * griffin["head_dim"] == griffin["hidden_dim"] == 2048
    assert (griffin["num_key_value_heads"], griffin["partial_rotary_factor"]) == (1, 1.0)
    assert griffin["embedding_scale"] is griffin["final_logit_soft_cap"] is None
    assert config("mqa_100m")["block_types"] == ("global_attention",)
    assert config("mqa_100m", partial_rotary_factor=0)["partial_rotary_factor"] == 0
    gemma = config("recurrentgemma_2b")
    assert (gemma["sliding_window"], gemma["head_dim"], gemma["num_blocks"]) == (2049, 256, 10)
    assert (gemma["embedding_scale"], gemma["final_logit_soft_cap"]) == (50.5, 30.0)


def test_names_are_listed_everywhere():
    for cls in (GriffinCausalLM, GriffinBackbone, GriffinTokenizer, GriffinCausalLMPreprocessor):
        assert list(cls.presets) == NAMES
    assert set(NAMES) < set(keras_hub.models.CausalLM.presets)
    descriptions = {
        name: row["metadata"]["description"] for name, row in GriffinCausalLM.presets.items()
    }
    assert "no weights" in descriptions["hawk_7b"]
    assert "in this package" in descriptions["griffin_tiny_text"]
    assert "hf://google/recurrentgemma-9b-it" in descriptions["recurrentgemma_9b_it"]


def test_a_name_gives_the_same_model_through_kerashub():
    ours = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    theirs = keras_hub.models.CausalLM.from_preset("hawk_tiny", num_layers=1)
    assert type(theirs) is GriffinCausalLM
    assert theirs.backbone.get_config() | {"name": ""} == ours.backbone.get_config() | {"name": ""}
    assert type(theirs.preprocessor.tokenizer) is GriffinTokenizer
    assert theirs.preprocessor.sequence_length == ours.preprocessor.sequence_length == 256
    backbone = keras_hub.models.Backbone.from_preset("hawk_tiny")
    assert type(backbone) is GriffinBackbone
    assert backbone.count_params() == GriffinCausalLM.presets["hawk_tiny"]["metadata"]["params"]
    preprocessor = keras_hub.models.CausalLMPreprocessor.from_preset("hawk_100m", packed=True)
    assert type(preprocessor) is GriffinCausalLMPreprocessor
    assert (preprocessor.packed, preprocessor.sequence_length) == (True, 1024)
    assert type(keras_hub.tokenizers.Tokenizer.from_preset("hawk_7b")) is GriffinTokenizer


def test_fresh_initialization_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(loaders, "_announced", set())
    with caplog.at_level(logging.WARNING, "keras_recurrent"):
        for _ in range(2):
            GriffinBackbone.from_preset("hawk_tiny", num_layers=1)
            keras_hub.models.Backbone.from_preset("hawk_tiny", num_layers=1)
    said = [record.getMessage() for record in caplog.records if record.name == "keras_recurrent"]
    assert said == ["hawk_tiny has no published weights: it starts from fresh initialization."]


def test_asking_for_weights_is_an_error_that_says_what_to_do():
    for cls in (GriffinCausalLM, GriffinBackbone):
        with pytest.raises(ValueError, match=r"no published weights.*save_to_preset"):
            cls.from_preset("hawk_tiny", load_weights=True)
        assert cls.from_preset("hawk_tiny", load_weights=False, num_layers=1)


def test_overrides_reach_backbone_preprocessor_and_model():
    model = GriffinCausalLM.from_preset(
        "hawk_100m",
        vocabulary_size=300,
        num_layers=2,
        hidden_dim=16,
        lru_width=16,
        intermediate_dim=16,
        dtype="bfloat16",
        sequence_length=8,
        packed=True,
        name="small",
        compile=False,
    )
    assert model.backbone.vocabulary_size == 300
    assert model.backbone.dtype_policy.name == "bfloat16"
    assert (model.preprocessor.sequence_length, model.preprocessor.packed) == (8, True)
    assert (model.name, model.compiled) == ("small", False)
    small = {"num_layers": 1, "vocabulary_size": VOCABULARY}
    assert GriffinCausalLM.from_preset("hawk_tiny", preprocessor=None, **small).preprocessor is None
    with pytest.raises(ValueError, match="`preprocessor`: its tokenizer has 259 tokens"):
        GriffinCausalLM.from_preset("hawk_tiny", **small)
    with pytest.raises(ValueError, match="'packed': belongs to the preprocessor"):
        GriffinCausalLM.from_preset("hawk_tiny", preprocessor=None, packed=True, **small)


@pytest.mark.parametrize(
    "load",
    [
        GriffinCausalLM.from_preset,
        GriffinBackbone.from_preset,
        keras_hub.models.CausalLM.from_preset,
        keras_hub.models.Backbone.from_preset,
        keras_hub.models.CausalLMPreprocessor.from_preset,
    ],
)
def test_no_override_is_ignored(load):
    with pytest.raises(ValueError, match=r"'(vocab_size|sequence_len)', which nothing takes"):
        load("hawk_tiny", **{"vocab_size": 7, "sequence_len": 3})


def test_unknown_names_list_near_ones():
    for load in (
        GriffinCausalLM.from_preset,
        GriffinBackbone.from_preset,
        keras_hub.models.CausalLM.from_preset,
        keras_hub.models.Backbone.from_preset,
    ):
        with pytest.raises(ValueError, match="hawk_100m"):
            load("hawk_10m")
        with pytest.raises(ValueError, match=r"[Uu]nknown preset"):
            load("something_else")
        with pytest.raises(ValueError, match=r"there is no '/.*nope'.*hf://owner") as error:
            load("./nope")
        assert "bert" not in str(error.value)
        with pytest.raises(ValueError, match=r"`preset` must be a string.*`str\(path\)`"):
            load(pathlib.Path("something"))


def test_a_paper_size_trains_on_strings_out_of_the_box():
    """But for its size, which is made small here, as are its rows."""
    sizes = {"hidden_dim": 16, "lru_width": 16, "intermediate_dim": 16, "num_layers": 1}
    model = GriffinCausalLM.from_preset("hawk_100m", sequence_length=8, **sizes)
    assert model.backbone.vocabulary_size == 32_000
    model.train_on_batch(["to be", "or not to be"])
    assert isinstance(model.generate("to", max_length=8), str)
    assert keras_recurrent.models.GriffinCausalLM is GriffinCausalLM
