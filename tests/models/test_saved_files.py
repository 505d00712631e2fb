"""Files of November 2026, when each layer kept a segment of its own, load and compute the same.

`tests/data/saved_models` was made on torch: `layers.keras`, a functional model of layers over time,
one of them with its state among inputs and outputs; `preset/`, a Griffin by `save_to_preset`; and
what both gave.
"""

import pathlib
import shutil

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.models import GriffinBackbone, GriffinCausalLM

SAVED = pathlib.Path(__file__).parents[1] / "data" / "saved_models"


def test_a_functional_model_of_layers():
    model = keras.models.load_model(SAVED / "layers.keras")
    then = np.load(SAVED / "layers.npz")
    before = {"hidden": then["hidden"], "segment": then["segment"]}
    got = model({"ids": then["ids"], "documents": then["documents"], "before": before})
    for name, array in (
        ("y", got["y"]),
        ("hidden_after", got["after"]["hidden"]),
        ("segment_after", got["after"]["segment"]),
    ):
        array = keras.ops.convert_to_numpy(array)
        np.testing.assert_allclose(array, then[name], rtol=1e-4, atol=1e-5)


@pytest.mark.once
def test_a_preset():
    model = keras_hub.models.CausalLM.from_preset(str(SAVED / "preset"))
    then = np.load(SAVED / "preset.npz")
    token_ids = then["token_ids"]
    logits = model({"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)})
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(logits), then["logits"], rtol=1e-4, atol=1e-4
    )


@pytest.mark.once
def test_a_preset_whose_weights_are_damaged(tmp_path, monkeypatch):
    """The error names the file, and comes before a model is built."""
    path = tmp_path / "damaged"
    shutil.copytree(SAVED / "preset", path)
    file = path / "model.weights.h5"
    content = file.read_bytes()

    def init(*args, **kwargs):
        raise AssertionError("a model was built")

    monkeypatch.setattr(GriffinBackbone, "__init__", init)
    for damaged in (b"", content[:1000], content[:-1], content[:100] + bytes(len(content) - 100)):
        file.write_bytes(damaged)
        for load in (GriffinCausalLM.from_preset, GriffinBackbone.from_preset):
            with pytest.raises(ValueError, match=r"model.weights.h5 is damaged or cut off"):
                load(str(path))


@pytest.mark.once
def test_a_preset_whose_configuration_is_not_one(tmp_path):
    path = tmp_path / "hostile"
    path.mkdir()
    for content in (
        '{"registered_name": "keras_recurrent>GriffinBackbone"}',
        '{"registered_name": 3}',
    ):
        (path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config.json of .*hostile"):
            GriffinBackbone.from_preset(str(path))
