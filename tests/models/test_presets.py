"""Names and sizes, and what may be said beside them."""

import logging

import keras
import keras_hub
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent.models import (
    GriffinBackbone,
    GriffinCausalLM,
    GriffinCausalLMPreprocessor,
    GriffinTokenizer,
    presets,
)
from tests.models.tiny import VOCABULARY

# Griffin, appendix C: D, D_rnn and depth; M is 3 throughout.
PAPER = {
    "hawk_100m": (768, 1024, 12),
    "hawk_200m": (1024, 1536, 12),
    "hawk_400m": (1536, 2048, 12),
    "hawk_1.3b": (2048, 2560, 24),
    "hawk_3b": (3072, 4096, 24),
    "hawk_7b": (4096, 5632, 32),
}
NAMES = ["hawk_tiny", *PAPER]


def parameters(d, d_rnn, depth, vocabulary, m=3, blocks=16, width=4):
    """Counted off the paper: section 2 (blocks), 2.4 and appendix A (RG-LRU), C (sizes)."""
    norm = d
    gate = blocks * (d_rnn // blocks) ** 2 + d_rnn
    rg_lru = 2 * gate + d_rnn
    convolution = (width + 1) * d_rnn
    recurrent = 2 * (d * d_rnn + d_rnn) + convolution + rg_lru + (d_rnn * d + d)
    mlp = 2 * (d * m * d + m * d) + (m * d * d + d)
    return vocabulary * d + depth * (2 * norm + recurrent + mlp) + norm


def count_without_memory(name, **kwargs):
    """Builds a model whose weights have shapes but no values."""
    with keras.StatelessScope(initialize_variables=False):
        backbone = GriffinBackbone.from_preset(name, **kwargs)
        parameters = sum(int(np.prod(weight.shape)) for weight in backbone.weights)
    # Keras would still give them values at the end of the next scope.
    keras.utils.clear_session(free_memory=False)
    return parameters


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_paper(name):
    listed = GriffinCausalLM.presets[name]["metadata"]["params"]
    if name in PAPER:
        d, d_rnn, depth = PAPER[name]
        assert listed == parameters(d, d_rnn, depth, vocabulary=32_000)
    else:
        assert listed == parameters(128, 176, 4, vocabulary=259)
    assert count_without_memory(name) == listed


def test_the_named_size_of_the_paper():
    assert round(GriffinCausalLM.presets["hawk_1.3b"]["metadata"]["params"] / 1e6, 1) == 1369.8


def test_names_are_listed_everywhere():
    for cls in (GriffinCausalLM, GriffinBackbone, GriffinTokenizer, GriffinCausalLMPreprocessor):
        assert list(cls.presets) == NAMES
    assert set(NAMES) < set(keras_hub.models.CausalLM.presets)
    assert "no weights" in GriffinCausalLM.presets["hawk_7b"]["metadata"]["description"]


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
    monkeypatch.setattr(presets, "_announced", set())
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


def test_a_paper_size_trains_on_strings_out_of_the_box():
    """But for its size, which is made small here, as are its rows."""
    sizes = {"hidden_dim": 16, "lru_width": 16, "intermediate_dim": 16, "num_layers": 1}
    model = GriffinCausalLM.from_preset("hawk_100m", sequence_length=8, **sizes)
    assert model.backbone.vocabulary_size == 32_000
    model.train_on_batch(["to be", "or not to be"])
    assert isinstance(model.generate("to", max_length=8), str)
    assert keras_recurrent.models.GriffinCausalLM is GriffinCausalLM
