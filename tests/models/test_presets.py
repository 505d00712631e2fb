"""Presets: names, published sizes, and the arguments that may be given with them."""

import importlib
import logging
import pathlib

import keras
import keras_hub
import pytest

from keras_recurrent.checkpoints import loaders
from keras_recurrent.models import (
    GriffinBackbone,
    GriffinCausalLM,
    GriffinCausalLMPreprocessor,
    GriffinTokenizer,
    HGRN2CausalLM,
)
from tests.layers.table import assert_rejects
from tests.models.tiny import FAMILIES, VOCABULARY, any_family

pytestmark = pytest.mark.once

SIZES = {
    family: importlib.import_module(f"keras_recurrent.presets.{family}").SIZES
    for family in FAMILIES
}


def test_preset_parameters_equal_the_published_numbers():
    """The width or depth of a preset and its number of parameters have the same error."""
    listed = {n: size.parameters for sizes in SIZES.values() for n, size in sizes.items()}
    assert round(listed["hawk_1.3b"] / 1e6, 1) == 1369.8
    assert round(listed["griffin_1.3b"] / 1e6, 1) == 1308.5
    assert round(listed["mqa_1.3b"] / 1e6, 1) == 1185.9
    assert listed["recurrentgemma_2b"] == listed["recurrentgemma_2b_it"] == 2_682_862_080
    assert listed["recurrentgemma_9b"] == listed["recurrentgemma_9b_it"] == 8_579_977_216
    assert listed["hgrn2_1.3b_100b"] == 1_364_396_032
    assert listed["nemotron_3_nano_4b"] == 3_973_556_832
    # Table 4 of HGRN2, WikiText-103; the paper prints neither depth nor widths of this model.
    assert listed["hgrn2_44m"] == pytest.approx(44.66e6, rel=2e-3)


DESCRIPTIONS = {
    "hawk_7b": "no weights",
    "griffin_tiny_text": "in this package",
    "recurrentgemma_9b_it": "hf://google/recurrentgemma-9b-it",
    "hgrn2_1.3b_100b": "hf://fla-hub/hgrn2-1.3B-100B",
    "hgrn2_2.7b_100b": "hf://fla-hub/hgrn2-2.7B-100B",
    **{name: "no weights are published" for name in SIZES["hgrn2"] if not name.endswith("_100b")},
    "tnl_7b": "hf://OpenNLPLab/TransNormerLLM-7B",
    "tnl_15b": "no weights",
    "nemotron_nano_9b_v2": "License of the weights: NVIDIA Open Model License Agreement.",
}


def test_descriptions_of_presets_name_the_source_of_weights():
    for name, text in DESCRIPTIONS.items():
        assert text in keras_hub.models.CausalLM.presets[name]["metadata"]["description"], name


@any_family
def test_presets_are_listed_by_all_classes_of_a_family_and_by_keras_hub(family):
    cls = FAMILIES[family]
    for part in (cls.causal_lm, cls.backbone, cls.tokenizer, cls.preprocessor):
        assert list(part.presets) == list(SIZES[family])
    assert set(SIZES[family]) < set(keras_hub.models.CausalLM.presets)


@pytest.mark.parametrize(
    ("family", "name", "sequence_length"),
    [
        ("griffin", "hawk_tiny", 256),
        ("hgrn2", "hgrn2_tiny", 1024),
        ("transnormer", "tnl_tiny", 256),
        ("lightning_hybrid", "hypenet_tiny", 1024),
        ("mamba_hybrid", "nemotron_h_tiny", 1024),
        ("lfm2", "lfm2_tiny", 1024),
    ],
)
def test_keras_hub_loads_the_model_and_backbone_of_a_preset_name(family, name, sequence_length):
    cls = FAMILIES[family]
    model, other = (c.from_preset(name) for c in (cls.causal_lm, keras_hub.models.CausalLM))
    assert type(other) is cls.causal_lm
    assert other.backbone.get_config() | {"name": ""} == model.backbone.get_config() | {"name": ""}
    assert type(other.preprocessor.tokenizer) is cls.tokenizer
    lengths = [m.preprocessor.sequence_length for m in (model, other)]
    assert lengths == [sequence_length, sequence_length]
    backbone = keras_hub.models.Backbone.from_preset(name)
    assert type(backbone) is cls.backbone
    assert backbone.count_params() == cls.causal_lm.presets[name]["metadata"]["params"]


def test_keras_hub_loads_preprocessors_and_tokenizers_of_preset_names():
    preprocessor = keras_hub.models.CausalLMPreprocessor.from_preset("hawk_100m", packed=True)
    assert type(preprocessor) is GriffinCausalLMPreprocessor
    assert (preprocessor.packed, preprocessor.sequence_length) == (True, 1024)
    assert type(keras_hub.tokenizers.Tokenizer.from_preset("hawk_7b")) is GriffinTokenizer


def test_presets_of_griffin_have_the_published_patterns_windows_and_scales():
    def config(name, **kwargs):
        with keras.StatelessScope(initialize_variables=False):
            small = {"num_layers": 3, "vocabulary_size": 300, **kwargs}
            backbone = GriffinBackbone.from_preset(name, load_weights=False, **small)
        keras.utils.clear_session(free_memory=False)
        return backbone.get_config()

    paper = config("griffin_1.3b")
    assert paper["block_types"] == ("recurrent", "recurrent", "local_attention")
    assert paper["sliding_window"] == 1024
    assert paper["num_query_heads"] * paper["head_dim"] == paper["hidden_dim"] == 2048
    assert (paper["num_key_value_heads"], paper["partial_rotary_factor"]) == (1, 1.0)
    assert paper["embedding_scale"] is paper["final_logit_soft_cap"] is None
    assert config("mqa_100m")["block_types"] == ("global_attention",)
    assert config("mqa_100m", partial_rotary_factor=0)["partial_rotary_factor"] == 0
    gemma = config("recurrentgemma_2b")
    assert (gemma["sliding_window"], gemma["head_dim"], gemma["num_blocks"]) == (2049, 256, 10)
    assert (gemma["embedding_scale"], gemma["final_logit_soft_cap"]) == (50.5, 30.0)


def test_fresh_initialization_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(loaders, "_announced", set())
    with caplog.at_level(logging.WARNING, "keras_recurrent"):
        for _ in range(2):
            GriffinBackbone.from_preset("hawk_tiny", num_layers=1)
            keras_hub.models.Backbone.from_preset("hawk_tiny", num_layers=1)
    messages = [
        record.getMessage() for record in caplog.records if record.name == "keras_recurrent"
    ]
    assert messages == ["hawk_tiny has no published weights: it starts from fresh initialization."]


def test_preset_with_published_weights_fetches_them_by_default(monkeypatch):
    fetched = []

    def fetch(preset, name):
        fetched.append((preset, name))
        raise ConnectionError("no network in tests")

    monkeypatch.setattr("keras_recurrent.checkpoints.files.fetch", fetch)
    with pytest.raises(ConnectionError, match="no network in tests"):
        HGRN2CausalLM.from_preset("hgrn2_1.3b_100b")
    assert fetched[0] == ("hf://fla-hub/hgrn2-1.3B-100B", "config.json")
    small = {"num_layers": 1, "hidden_dim": 16, "intermediate_dim": 16, "expand_ratio": 4}
    assert HGRN2CausalLM.from_preset("hgrn2_2.7b_100b", load_weights=False, **small).built
    assert len(fetched) == 1


def test_load_weights_of_a_preset_without_weights_is_rejected():
    for cls in (GriffinCausalLM, GriffinBackbone):
        match = r"no published weights.*save_to_preset"
        assert_rejects(match, cls.from_preset, "hawk_tiny", load_weights=True)
        assert cls.from_preset("hawk_tiny", load_weights=False, num_layers=1)


def test_overrides_reach_backbone_preprocessor_and_model():
    sizes = {"num_layers": 1, "hidden_dim": 16, "lru_width": 16, "intermediate_dim": 16}
    model = GriffinCausalLM.from_preset("hawk_100m", sequence_length=8, **sizes)
    assert model.backbone.vocabulary_size == 32_000
    model.train_on_batch(["to be", "or not to be"])
    assert isinstance(model.generate("to", max_length=8), str)
    options = {"dtype": "bfloat16", "packed": True, "name": "small", "compile": False}
    options |= {"vocabulary_size": 300, "sequence_length": 8}
    model = GriffinCausalLM.from_preset("hawk_100m", **sizes, **options)
    assert model.backbone.vocabulary_size == 300
    assert model.backbone.dtype_policy.name == "bfloat16"
    assert (model.preprocessor.sequence_length, model.preprocessor.packed) == (8, True)
    assert (model.name, model.compiled) == ("small", False)
    small = {"num_layers": 1, "vocabulary_size": VOCABULARY}
    assert GriffinCausalLM.from_preset("hawk_tiny", preprocessor=None, **small).preprocessor is None
    load, match = GriffinCausalLM.from_preset, "`preprocessor`: its tokenizer has 259 tokens"
    assert_rejects(match, load, "hawk_tiny", **small)
    match = "'packed': belongs to the preprocessor"
    assert_rejects(match, load, "hawk_tiny", preprocessor=None, packed=True, **small)


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
def test_from_preset_rejects_unknown_overrides(load):
    match = r"'(vocab_size|sequence_len)', which nothing takes"
    assert_rejects(match, load, "hawk_tiny", vocab_size=7, sequence_len=3)


def test_from_preset_of_an_unknown_name_suggests_similar_ones():
    for load in (
        GriffinCausalLM.from_preset,
        GriffinBackbone.from_preset,
        keras_hub.models.CausalLM.from_preset,
        keras_hub.models.Backbone.from_preset,
    ):
        assert_rejects("hawk_100m", load, "hawk_10m")
        assert_rejects(r"[Uu]nknown preset", load, "something_else")
        with pytest.raises(ValueError, match=r"there is no '/.*nope'.*hf://owner") as error:
            load("./nope")
        assert "bert" not in str(error.value)
        match = r"`preset` must be a string.*`str\(path\)`"
        assert_rejects(match, load, pathlib.Path("something"))
