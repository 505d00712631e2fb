"""HGRN2: lower bounds and hybrids with attention."""

import keras
import numpy as np
import pytest

from keras_recurrent.models import HGRN2Backbone, HGRN2CausalLM
from tests.layers.table import numpy
from tests.models import reference
from tests.models.test_backbone import assert_streams
from tests.models.tiny import (
    FAMILIES,
    HYBRID,
    VOCABULARY,
    tiny_backbone,
    tiny_causal_lm,
)

SIZES = FAMILIES["hgrn2"].sizes
LENGTH = 8


def tokens():
    return np.random.default_rng(0).integers(3, VOCABULARY, (2, LENGTH)).astype("int32")


def test_hybrid_with_packed_documents_matches_the_reference():
    """A block has the bound of another one, or attention has wrong positions or documents."""
    model = tiny_causal_lm(family="hgrn2", **HYBRID, sliding_window=3)
    token_ids = tokens()
    real = np.ones_like(token_ids)
    real[0, [0, 4]] = 0
    segment_ids = np.array([[0] * LENGTH, [1] * 3 + [2] * (LENGTH - 3)], "int32")
    x = {"token_ids": token_ids, "padding_mask": real, "segment_ids": segment_ids}
    packed = numpy(model.predict_on_batch(x))
    expected = reference.logits(model, token_ids, real, segment_ids)
    np.testing.assert_allclose(packed[real > 0], expected[real > 0], rtol=1e-4, atol=1e-4)
    assert_streams(model, token_ids[1:], reference.logits(model, token_ids[1:]))


@pytest.mark.once
def test_enable_lora_includes_keys_and_values_of_attention_in_hybrids():
    backbone = tiny_backbone(family="hgrn2", **HYBRID)
    backbone.enable_lora(2)
    adapted = {w.path.rsplit("/", 1)[0] for w in backbone.trainable_weights if "lora" in w.path}
    attention = {f"block_1/temporal_block/{name}_proj" for name in "qkvo"}
    recurrent = {f"block_{i}/temporal_block/{name}_proj" for i in (0, 2) for name in "qfio"}
    assert adapted == attention | recurrent


def test_training_step_moves_all_lower_bounds():
    model = tiny_causal_lm(family="hgrn2", num_layers=3)
    token_ids = tokens()
    bounds = model.backbone.lower_bounds.logits
    before = numpy(bounds).copy()
    model.compile(keras.optimizers.SGD(1.0))
    model.train_on_batch({"token_ids": token_ids, "padding_mask": token_ids > 0}, token_ids)
    step = numpy(bounds) - before
    assert np.isfinite(step).all()
    assert (step != 0).all()
    # The bounds are shares of all layers: gains and losses add up to 0.
    np.testing.assert_allclose(step.sum(axis=0), 0, atol=1e-5)


@pytest.mark.once
def test_backbone_of_one_block_has_no_lower_bounds():
    for backbone in (tiny_backbone(family="hgrn2", num_layers=1), HGRN2Backbone(**SIZES)):
        names = {weight.path.partition("/")[0] for weight in backbone.weights}
        assert ("lower_bounds" in names) == (backbone.num_layers > 1)


@pytest.mark.once
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
