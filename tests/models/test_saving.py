"""Saved models come back as they were."""

import json

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.models import (
    GriffinBackbone,
    GriffinCausalLM,
    GriffinCausalLMPreprocessor,
    GriffinTokenizer,
)
from tests.models.tiny import SIZES, set_weights

TEXTS = ["to be", "or not"]


def language_model(**kwargs):
    sizes = {**SIZES, "vocabulary_size": 259, "num_layers": 1, **kwargs}
    backbone = GriffinBackbone(**sizes)
    set_weights(backbone, seed=0)
    preprocessor = GriffinCausalLMPreprocessor(GriffinTokenizer(), sequence_length=8, packed=True)
    return GriffinCausalLM(backbone, preprocessor)


def logits(model):
    tokens, _, _ = model.preprocessor(TEXTS)
    return keras.ops.convert_to_numpy(keras.ops.cast(model(tokens), "float32"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, and its directory of `save_to_preset`."""
    model = language_model()
    path = str(tmp_path_factory.mktemp("presets") / "hawk")
    model.save_to_preset(path)
    return model, path


@pytest.mark.parametrize("cls", [GriffinCausalLM, keras_hub.models.CausalLM])
def test_a_preset_directory_loads_through_our_class_and_kerashubs(saved, cls):
    model, path = saved
    again = cls.from_preset(path)
    assert type(again) is GriffinCausalLM
    np.testing.assert_allclose(logits(again), logits(model), rtol=1e-5, atol=1e-5)
    assert (again.preprocessor.packed, again.preprocessor.sequence_length) == (True, 8)


def test_the_parts_of_a_preset_directory_load_by_themselves(saved):
    model, path = saved
    for cls in (GriffinBackbone, keras_hub.models.Backbone):
        backbone = cls.from_preset(path)
        for a, b in zip(backbone.get_weights(), model.backbone.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    assert keras_hub.models.CausalLMPreprocessor.from_preset(path).packed
    assert type(keras_hub.tokenizers.Tokenizer.from_preset(path)) is GriffinTokenizer
    with open(f"{path}/metadata.json") as file:
        assert json.load(file)["parameter_count"] == model.backbone.count_params()


def test_overrides_of_a_preset_directory(saved):
    _, path = saved
    model = GriffinCausalLM.from_preset(path, sequence_length=4, dtype="bfloat16", name="hawk")
    assert (model.preprocessor.sequence_length, model.preprocessor.packed) == (4, True)
    assert (model.backbone.dtype_policy.name, model.name) == ("bfloat16", "hawk")
    fresh = GriffinCausalLM.from_preset(path, load_weights=False, num_layers=2)
    assert len(fresh.backbone.transformer_layers) == 2
    with pytest.raises(ValueError, match="'num_layers': the weights in"):
        GriffinCausalLM.from_preset(path, num_layers=2)
    for cls in (GriffinCausalLM, GriffinBackbone):
        with pytest.raises(ValueError, match="'num_layer', which nothing takes"):
            cls.from_preset(path, num_layer=2)
    with pytest.raises(TypeError, match="num_layer"):
        keras_hub.models.CausalLM.from_preset(path, num_layer=2)


def test_weights_load_where_there_are_any(saved, tmp_path):
    model, _ = saved
    for part in (model.backbone, model.preprocessor):
        part.save_to_preset(str(tmp_path))
    (tmp_path / "model.weights.h5").unlink()
    again = GriffinCausalLM.from_preset(str(tmp_path))
    assert again.backbone.count_params() == model.backbone.count_params()
    with pytest.raises(FileNotFoundError):
        GriffinCausalLM.from_preset(str(tmp_path), load_weights=True)


def test_keras_files_and_training_goes_on(tmp_path):
    model = language_model()
    model.compile(keras.optimizers.AdamW(0.01), sampler=keras_hub.samplers.TopKSampler(k=3, seed=1))
    model.train_on_batch(TEXTS)
    model.save(tmp_path / "hawk.keras")
    again = keras.saving.load_model(tmp_path / "hawk.keras")
    assert type(again) is GriffinCausalLM
    np.testing.assert_allclose(logits(again), logits(model), rtol=1e-5, atol=1e-5)
    assert again.preprocessor.packed
    assert again.sampler.get_config() == model.sampler.get_config()
    for one in (model, again):
        one.train_on_batch(TEXTS)
    np.testing.assert_allclose(logits(again), logits(model), rtol=1e-4, atol=1e-4)


def test_keras_files_of_a_backbone(saved, tmp_path):
    model, _ = saved
    model.backbone.save(tmp_path / "backbone.keras")
    assert type(keras.saving.load_model(tmp_path / "backbone.keras")) is GriffinBackbone


def test_mixed_precision_survives(tmp_path):
    model = language_model(dtype="mixed_bfloat16")
    model.save(tmp_path / "hawk.keras")
    again = keras.saving.load_model(tmp_path / "hawk.keras")
    assert again.backbone.dtype_policy.name == "mixed_bfloat16"
    np.testing.assert_array_equal(logits(again), logits(model))


def test_lora_trains_its_own_weights_alone_and_saves_them(tmp_path):
    model = language_model()
    model.backbone.enable_lora(2)
    trainable = {weight.path.rsplit("/", 1)[1] for weight in model.trainable_weights}
    assert trainable == {"lora_kernel_a", "lora_kernel_b"}
    assert len(model.trainable_weights) == 2 * 3
    before = {w.path: keras.ops.convert_to_numpy(w) for w in model.backbone.weights}
    model.compile(keras.optimizers.Adam(0.1))
    model.train_on_batch(TEXTS)
    changed = [w.path for w in model.backbone.weights if (before[w.path] != w).any()]
    assert sum("lora_kernel_b" in path for path in changed) == 3
    assert all("lora_kernel" in path for path in changed)

    model.backbone.save_lora_weights(str(tmp_path / "hawk.lora.h5"))
    again = language_model()
    again.backbone.load_lora_weights(str(tmp_path / "hawk.lora.h5"))
    np.testing.assert_allclose(logits(again), logits(model), rtol=1e-4, atol=1e-5)


# Keras warns of every layer without such weights, input layers included.
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
@pytest.mark.filterwarnings("ignore:.*The use of `x.T` on tensors:UserWarning")
def test_int8_saves_and_stays_near(tmp_path):
    language_model().quantize("int8")  # also before the preprocessor was ever called
    model = language_model()
    exact = logits(model)
    model.quantize("int8")
    quantized = {layer.name for layer in model._flatten_layers() if layer.quantization_mode}
    assert quantized == {
        *("token_embedding", "linear_x", "linear_y", "linear_out"),
        *("recurrence_gate", "input_gate", "gate_proj", "up_proj", "down_proj"),
    }
    error = logits(model) - exact
    assert np.sqrt((error**2).mean()) < 0.1 * np.sqrt((exact**2).mean())
    model.save_to_preset(str(tmp_path / "hawk"))
    again = GriffinCausalLM.from_preset(str(tmp_path / "hawk"))
    np.testing.assert_allclose(logits(again), logits(model), rtol=1e-4, atol=1e-4)
    backbone = GriffinBackbone.from_preset(str(tmp_path / "hawk"))
    for a, b in zip(backbone.get_weights(), model.backbone.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    model.save(tmp_path / "hawk.keras")
    again = keras.saving.load_model(tmp_path / "hawk.keras")
    np.testing.assert_allclose(logits(again), logits(model), rtol=1e-4, atol=1e-4)
