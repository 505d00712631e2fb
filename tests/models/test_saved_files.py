"""Files of November 2026 load and give their outputs of then.

In these files each layer has a segment. `tests/data/saved_models` was made on torch: `layers.keras`
is a functional model of streaming layers, one of them with its state among inputs and outputs;
`preset/` is a Griffin by `save_to_preset`; the other files hold their outputs.
"""

import pathlib
import shutil

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.models import GriffinBackbone, GriffinCausalLM
from tests.layers.table import assert_rejects

pytestmark = pytest.mark.once

SAVED = pathlib.Path(__file__).parents[1] / "data" / "saved_models"


def test_older_functional_model_of_layers_loads_with_its_outputs():
    model = keras.models.load_model(SAVED / "layers.keras")
    saved = np.load(SAVED / "layers.npz")
    before = {"hidden": saved["hidden"], "segment": saved["segment"]}
    got = model({"ids": saved["ids"], "documents": saved["documents"], "before": before})
    for name, array in (
        ("y", got["y"]),
        ("hidden_after", got["after"]["hidden"]),
        ("segment_after", got["after"]["segment"]),
    ):
        array = keras.ops.convert_to_numpy(array)
        np.testing.assert_allclose(array, saved[name], rtol=1e-4, atol=1e-5)


def test_older_preset_loads_with_its_outputs():
    model = keras_hub.models.CausalLM.from_preset(str(SAVED / "preset"))
    saved = np.load(SAVED / "preset.npz")
    token_ids = saved["token_ids"]
    logits = model({"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)})
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(logits), saved["logits"], rtol=1e-4, atol=1e-4
    )


def test_damaged_weights_raise_an_error_with_the_file_name_before_a_model_is_built(
    tmp_path, monkeypatch
):
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
            assert_rejects(r"model.weights.h5 is damaged or cut off", load, str(path))


def test_malformed_config_json_raises_an_error_with_its_path(tmp_path):
    path = tmp_path / "hostile"
    path.mkdir()
    for content in (
        '{"registered_name": "keras_recurrent>GriffinBackbone"}',
        '{"registered_name": 3}',
    ):
        (path / "config.json").write_text(content)
        assert_rejects(r"config.json of .*hostile", GriffinBackbone.from_preset, str(path))
