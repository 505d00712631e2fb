"""What HGRN2's models have and those of other families do not."""

import keras
import numpy as np
import pytest

from keras_recurrent.models import HGRN2Backbone, HGRN2CausalLM, HGRN2ResidualBlock
from tests.models import numpy_hgrn2
from tests.models.test_presets import count_without_memory
from tests.models.tiny import (
    FAMILIES,
    HYBRID,
    VOCABULARY,
    forward,
    tiny_backbone,
    tiny_causal_lm,
)

SIZES = FAMILIES["hgrn2"].sizes
LENGTH = 8


def tokens():
    return np.random.default_rng(0).integers(3, VOCABULARY, (2, LENGTH)).astype("int32")


@pytest.mark.parametrize(
    "variant",
    [
        {"conv_size": 3},
        {"gate_activation": "sigmoid", "input_activation": "silu", "tie_word_embeddings": True},
        {"use_lower_bounds": False},
    ],
    ids=["short convolutions", "activations of the paper, tied", "no lower bounds"],
)
def test_variants_are_those_of_the_paper(variant):
    model = tiny_causal_lm(family="hgrn2", **variant)
    token_ids = tokens()
    real = np.ones_like(token_ids)
    real[0, [0, 4]] = 0
    logits = forward(model, token_ids, real)
    wanted = numpy_hgrn2.logits(model, token_ids, real)
    np.testing.assert_allclose(logits[real > 0], wanted[real > 0], rtol=1e-4, atol=1e-4)
    if "conv_size" in variant:
        check_streaming(model, token_ids, logits[1:])


def check_streaming(model, token_ids, wanted):
    """The cache takes tokens in any portions."""
    cache = model.backbone.get_initial_state(1, max_length=LENGTH)
    parts = []
    for part in (token_ids[1:, :4], token_ids[1:, 4:]):
        logits, _, cache = model.call_with_cache(part, cache)
        parts.append(keras.ops.convert_to_numpy(logits))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), wanted, rtol=1e-4, atol=1e-4)


def test_hybrids_with_packed_documents():
    """Fails if a block has the bound of another one, or if positions, the window or documents of
    attention are wrong.
    """
    model = tiny_causal_lm(family="hgrn2", **HYBRID, sliding_window=3)
    token_ids = tokens()
    real = np.ones_like(token_ids)
    real[0, [0, 4]] = 0
    segment_ids = np.array([[0] * LENGTH, [1] * 3 + [2] * (LENGTH - 3)], "int32")
    x = {"token_ids": token_ids, "padding_mask": real, "segment_ids": segment_ids}
    packed = keras.ops.convert_to_numpy(model.predict_on_batch(x))
    wanted = numpy_hgrn2.logits(model, token_ids, real, segment_ids)
    np.testing.assert_allclose(packed[real > 0], wanted[real > 0], rtol=1e-4, atol=1e-4)
    check_streaming(model, token_ids, numpy_hgrn2.logits(model, token_ids[1:]))


@pytest.mark.once
def test_lora_reaches_the_attention_of_hybrids():
    """Fails if keys and values of attention are left out."""
    backbone = tiny_backbone(family="hgrn2", **HYBRID)
    backbone.enable_lora(2)
    adapted = {w.path.rsplit("/", 1)[0] for w in backbone.trainable_weights if "lora" in w.path}
    attention = {f"block_1/temporal_block/{name}_proj" for name in "qkvo"}
    recurrent = {f"block_{i}/temporal_block/{name}_proj" for i in (0, 2) for name in "qfio"}
    assert adapted == attention | recurrent


def test_all_lower_bounds_learn():
    model = tiny_causal_lm(family="hgrn2", num_layers=3)
    token_ids = tokens()
    bounds = model.backbone.lower_bounds.logits
    before = keras.ops.convert_to_numpy(bounds)
    model.compile(keras.optimizers.SGD(1.0))
    model.train_on_batch({"token_ids": token_ids, "padding_mask": token_ids > 0}, token_ids)
    step = keras.ops.convert_to_numpy(bounds) - before
    assert np.isfinite(step).all()
    assert (step != 0).all()
    # Shares: what one layer gains the others lose.
    np.testing.assert_allclose(step.sum(axis=0), 0, atol=1e-5)


@pytest.mark.once
def test_a_block_alone_has_no_bounds():
    for backbone in (tiny_backbone(family="hgrn2", num_layers=1), HGRN2Backbone(**SIZES)):
        names = {weight.path.partition("/")[0] for weight in backbone.weights}
        assert ("lower_bounds" in names) == (backbone.num_layers > 1)


@pytest.mark.once
def test_a_residual_block_serializes_and_streams_with_its_bound():
    block = tiny_backbone(family="hgrn2").transformer_layers[1]
    again = HGRN2ResidualBlock.from_config(block.get_config())
    again.build((None, None, 16))
    for weight, value in zip(again.weights, block.get_weights(), strict=True):
        weight.assign(value)
    x = np.random.default_rng(0).normal(size=(2, 8, 16)).astype("float32")
    bound = np.log(np.stack([np.linspace(0.1, 0.9, 16), 1 - np.linspace(0.1, 0.9, 16)]))
    whole = keras.ops.convert_to_numpy(block(x, lower_bound=bound))
    left, state = again(x[:, :4], lower_bound=bound, return_state=True)
    right = again(x[:, 4:], lower_bound=bound, initial_state=state)
    parts = np.concatenate([keras.ops.convert_to_numpy(p) for p in (left, right)], axis=1)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5)
    free = keras.ops.convert_to_numpy(block(x))
    assert np.abs(free - whole).max() > 0.1


@pytest.mark.once
def test_bad_arguments():
    for name, value in [("expand_ratio", 5), ("conv_size", 0), ("intermediate_dim", 0)]:
        with pytest.raises(ValueError, match=f"`{name}`"):
            HGRN2Backbone(**{**SIZES, name: value})
    for name, value, message in [
        ("attention_layers", (1, 1), r"distinct integers from 0 to .*, 2; got \(1, 1\)"),
        ("attention_layers", (3,), r"distinct integers .*got \(3,\)"),
        ("attention_layers", (-1,), r"distinct integers .*got \(-1,\)"),
        ("attention_layers", (True,), r"distinct integers .*got \(True,\)"),
        ("attention_layers", 1, "must be a tuple .*got 1"),
        ("num_query_heads", None, "is needed for the blocks with attention"),
        ("num_query_heads", 16, "must divide `hidden_dim`, 16, .* even size.*got 16"),
        ("num_key_value_heads", 3, "must divide `num_query_heads`"),
        ("sliding_window", 0, "at least 1; got 0"),
    ]:
        with pytest.raises(ValueError, match=f"`{name}` .*{message}"):
            HGRN2Backbone(**{**SIZES, **HYBRID, name: value})


# Blocks, width, width inside, vocabulary, and how often the vocabulary has weights.
PRESETS = {
    "hgrn2_tiny": (4, 128, 352, 259, 2),
    "hgrn2_44m": (6, 512, 1376, 50_265, 1),
    "hgrn2_150m": (15, 768, 2048, 32_000, 2),
    "hgrn2_385m": (26, 1024, 2816, 32_000, 2),
    "hgrn2_1b": (18, 2048, 5632, 32_000, 2),
    "hgrn2_2.9b": (36, 2560, 6912, 32_000, 2),
    "hgrn2_7b": (32, 4096, 11_008, 32_000, 2),
    "hgrn2_1.3b_100b": (24, 2048, 5632, 32_000, 2),
    "hgrn2_2.7b_100b": (32, 2560, 6912, 32_000, 2),
}


@pytest.mark.once
def test_parameters_follow_from_the_sizes_in_the_paper():
    assert list(HGRN2CausalLM.presets) == list(HGRN2Backbone.presets) == list(PRESETS)
    for name, (layers, d, m, vocabulary, copies) in PRESETS.items():
        mixing, channels, norms, bound = 4 * d * d, 3 * d * m, 3 * d, d
        wanted = layers * (mixing + channels + norms + bound) + d + copies * vocabulary * d
        listed = HGRN2CausalLM.presets[name]["metadata"]
        assert listed["params"] == wanted, name
        assert count_without_memory(name, HGRN2Backbone, load_weights=False) == wanted, name
        published = "hf://fla-hub/hgrn2-" + name.removeprefix("hgrn2_").replace("b", "B")
        published = published.replace("_", "-")
        said = published if name.endswith("_100b") else "no weights are published"
        assert said in listed["description"], name
    assert HGRN2CausalLM.presets["hgrn2_1.3b_100b"]["metadata"]["params"] == 1_364_396_032


@pytest.mark.once
def test_parameters_that_the_paper_prints():
    """44.66 million on WikiText-103 (table 4), whose depth and widths it does not print."""
    parameters = HGRN2CausalLM.presets["hgrn2_44m"]["metadata"]["params"]
    assert parameters == pytest.approx(44.66e6, rel=2e-3)


@pytest.mark.once
def test_published_weights_load_by_default(monkeypatch):
    """Nothing is fetched here: the name leads to the repository."""
    asked = []

    def fetch(preset, name):
        asked.append((preset, name))
        raise ConnectionError("no network in tests")

    monkeypatch.setattr("keras_recurrent.checkpoints.files.fetch", fetch)
    with pytest.raises(ConnectionError, match="no network in tests"):
        HGRN2CausalLM.from_preset("hgrn2_1.3b_100b")
    assert asked[0] == ("hf://fla-hub/hgrn2-1.3B-100B", "config.json")
    small = {"num_layers": 1, "hidden_dim": 16, "intermediate_dim": 16, "expand_ratio": 4}
    assert HGRN2CausalLM.from_preset("hgrn2_2.7b_100b", load_weights=False, **small).built
    assert len(asked) == 1
