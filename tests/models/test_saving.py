"""Saved models load with equal configuration, weights and outputs."""

import json

import keras
import keras_hub
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent.models import GriffinCausalLM, HGRN2TextClassifier
from tests.models.tiny import (
    FAMILIES,
    FEWER_LAYERS,
    SHARED,
    set_weights,
    shared_by_families,
    tiny_causal_lm,
)
from tests.processes import fresh_process

TEXTS = ["to be", "or not"]
# Linear maps that low-rank weights go beside, in two blocks, and that mix tokens in int8.
LORA = {"griffin": 3 + 4, "hgrn2": 2 * 4, "transnormer": 2 * 5, "lightning_hybrid": 4 + 5}
INT8 = {
    "griffin": (
        *("linear_x", "linear_y", "linear_out", "recurrence_gate", "input_gate"),
        *("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "hgrn2": ("q_proj", "f_proj", "i_proj", "o_proj"),
    "transnormer": ("q_proj", "k_proj", "v_proj", "u_proj", "o_proj"),
    "lightning_hybrid": ("q_proj", "k_proj", "v_proj", "u_proj", "gate_proj", "o_proj"),
}


def language_model(family="griffin", **kwargs):
    cls = FAMILIES[family]
    # Two blocks: in a Griffin, one of them is local attention.
    backbone = cls.backbone(**{**cls.sizes, "vocabulary_size": 259, "num_layers": 2, **kwargs})
    set_weights(backbone, seed=0)
    preprocessor = cls.preprocessor(cls.tokenizer(), sequence_length=8, packed=True)
    return cls.causal_lm(backbone, preprocessor)


def logits(model):
    tokens, _, _ = model.preprocessor(TEXTS)
    return keras.ops.convert_to_numpy(keras.ops.cast(model(tokens), "float32"))


@pytest.fixture(scope="module", params=SHARED)
def saved(request, tmp_path_factory):
    """A model, and its directory of `save_to_preset`."""
    model = language_model(request.param)
    path = str(tmp_path_factory.mktemp("presets") / request.param)
    model.save_to_preset(path)
    return model, path


@pytest.mark.once
def test_a_preset_directory_loads_through_our_class_and_kerashubs(saved):
    model, path = saved
    for cls in (type(model), keras_hub.models.CausalLM):
        again = cls.from_preset(path)
        assert type(again) is type(model)
        np.testing.assert_allclose(logits(again), logits(model), rtol=1e-5, atol=1e-5)
        assert (again.preprocessor.packed, again.preprocessor.sequence_length) == (True, 8)


@pytest.mark.once
def test_the_parts_of_a_preset_directory_load_by_themselves(saved):
    model, path = saved
    for cls in (type(model.backbone), keras_hub.models.Backbone):
        backbone = cls.from_preset(path)
        for a, b in zip(backbone.get_weights(), model.backbone.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    assert keras_hub.models.CausalLMPreprocessor.from_preset(path).packed
    tokenizer = keras_hub.tokenizers.Tokenizer.from_preset(path)
    assert type(tokenizer) is type(model.preprocessor.tokenizer)
    with open(f"{path}/metadata.json") as file:
        assert json.load(file)["parameter_count"] == model.backbone.count_params()


@pytest.mark.once
def test_weights_of_a_preset_directory_are_not_drawn_first(saved, monkeypatch):
    """Random numbers for a large embedding take several times its memory."""
    model, path = saved

    def draw(self, *arguments, **options):
        raise AssertionError("random weights")

    for name in ("RandomNormal", "RandomUniform", "TruncatedNormal", "VarianceScaling"):
        monkeypatch.setattr(getattr(keras.initializers, name), "__call__", draw)
    for cls in (type(model), type(model.backbone), keras_hub.models.CausalLM):
        cls.from_preset(path)
    with pytest.raises(AssertionError, match="random weights"):
        type(model).from_preset(path, load_weights=False)


@pytest.mark.once
def test_overrides_of_a_preset_directory(saved):
    model, path = saved
    causal_lm, backbone = type(model), type(model.backbone)
    model = causal_lm.from_preset(path, sequence_length=4, dtype="bfloat16", name="hawk")
    assert (model.preprocessor.sequence_length, model.preprocessor.packed) == (4, True)
    assert (model.backbone.dtype_policy.name, model.name) == ("bfloat16", "hawk")
    fresh = causal_lm.from_preset(path, load_weights=False, num_layers=1)
    assert len(fresh.backbone.transformer_layers) == 1
    with pytest.raises(ValueError, match="'num_layers': the weights in"):
        causal_lm.from_preset(path, num_layers=1)
    for cls in (causal_lm, backbone):
        with pytest.raises(ValueError, match="'num_layer', which nothing takes"):
            cls.from_preset(path, num_layer=2)
    with pytest.raises(TypeError, match="num_layer"):
        keras_hub.models.CausalLM.from_preset(path, num_layer=2)


@pytest.mark.once
def test_missing_weights_are_an_error(saved, tmp_path):
    model, _ = saved
    for part in (model.backbone, model.preprocessor):
        part.save_to_preset(str(tmp_path))
    (tmp_path / "model.weights.h5").unlink()
    for cls in (type(model), type(model.backbone)):
        for load_weights in (None, True):
            with pytest.raises(FileNotFoundError, match=r"neither model.weights.h5.*load_weights="):
                cls.from_preset(str(tmp_path), load_weights)
    fresh = type(model).from_preset(str(tmp_path), load_weights=False)
    assert fresh.backbone.count_params() == model.backbone.count_params()


@pytest.mark.once
def test_a_directory_of_a_backbone_alone(tmp_path):
    model = language_model()
    model.backbone.save_to_preset(str(tmp_path))
    for arguments in ({}, {"sequence_length": 4}):
        with pytest.raises(FileNotFoundError, match=r"only a backbone. .*`preprocessor=None`"):
            type(model).from_preset(str(tmp_path), **arguments)
    again = type(model).from_preset(str(tmp_path), preprocessor=None)
    assert again.preprocessor is None
    again = type(model).from_preset(str(tmp_path), preprocessor=model.preprocessor)
    np.testing.assert_array_equal(logits(again), logits(model))


def test_keras_files_and_training_goes_on(tmp_path):
    model = language_model(**FEWER_LAYERS)
    sampler = keras_hub.samplers.TopKSampler(k=3, seed=1)
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    keras_recurrent.exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer, sampler=sampler)
    model.train_on_batch(TEXTS)
    model.save(tmp_path / "hawk.keras")
    again = keras.saving.load_model(tmp_path / "hawk.keras")
    assert type(again) is GriffinCausalLM
    np.testing.assert_allclose(logits(again), logits(model), rtol=1e-5, atol=1e-5)
    assert again.preprocessor.packed
    assert again.sampler.get_config() == model.sampler.get_config()
    # Keras keeps what "auto" means for `fit` here, which says nothing of generation.
    assert again._compiles_generation is None
    for one in (model, again):
        one.train_on_batch(TEXTS)
    np.testing.assert_allclose(logits(again), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.once
@pytest.mark.parametrize(
    "make_optimizer",
    [
        keras.optimizers.Adam,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW()),
        lambda: keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.SGD())
        ),
    ],
    ids=["Adam", "LossScaleOptimizer", "MultiOptimizer"],
)
def test_a_compile_config_names_no_backend(make_optimizer):
    """Fails if it names torch's class of an optimizer, which would import torch to load it."""
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    for one in (model, HGRN2TextClassifier(model.backbone, num_classes=2), model.backbone):
        one.compile(make_optimizer(), "mse")
        config = one.get_compile_config()
        assert "keras.src" not in json.dumps(config)
        arguments = config.get("config", config)
        assert "config" not in config or arguments["jit_compile"] == "auto"
        # As in files that name the class, here one that cannot be imported.
        arguments["optimizer"] = _replace_module(arguments["optimizer"])
        one.compile_from_config(config)
        assert type(one.optimizer) is type(make_optimizer())


def _replace_module(config):
    """Replaces the public modules of optimizers by one that does not exist, but looks private."""
    text = json.dumps(config)
    for name in ("Adam", "AdamW", "SGD"):
        public = f'"module": "keras.optimizers", "class_name": "{name}"'
        private = public.replace("keras.optimizers", "keras.src.backend.torch.optimizers.missing")
        text = text.replace(public, private)
    assert ".missing" in text
    return json.loads(text)


@pytest.mark.nightly
@pytest.mark.once
@pytest.mark.parametrize(
    ("family", "dtype", "saved_on", "loaded_on"),
    [
        ("griffin", "float32", "torch", "tensorflow"),
        ("hgrn2", "float32", "torch", "jax"),
        ("transnormer", "mixed_float16", "torch", "tensorflow"),
        ("transnormer", "mixed_float16", "jax", "torch"),
    ],
)
def test_training_continues_on_another_backend(family, dtype, saved_on, loaded_on, tmp_path):
    """Fails if the file imports the first backend, or optimizer state or compilation differ."""
    for backend in (saved_on, loaded_on):
        pytest.importorskip(backend)
    arguments = str(tmp_path / "model.keras"), family, dtype
    module = "tests.models.saved_on_another_backend"
    saved, loaded = (
        fresh_process("-m", module, action, *arguments, KERAS_BACKEND=backend)
        for action, backend in (("save", saved_on), ("load", loaded_on))
    )
    if loaded_on != "torch":
        assert "torch" not in loaded["frameworks"]
    assert loaded["optimizer"] == saved["optimizer"]
    assert loaded["variables"] == saved["variables"]
    assert loaded["jit_compile"] == (loaded_on == "jax")
    tolerance = 1e-5 if dtype == "float32" else 5e-4
    np.testing.assert_allclose(loaded["losses"], saved["losses"], rtol=tolerance)


@pytest.mark.once
def test_a_clone_is_compiled_as_the_original(tmp_path):
    model = language_model()
    model.compile(keras.optimizers.Lion(0.01), sampler="greedy")
    clone = keras.models.clone_model(model)
    assert clone.optimizer.get_config() == model.optimizer.get_config()
    assert type(clone.loss) is type(model.loss)
    x, y, sample_weight = model.preprocessor(TEXTS)
    assert np.isfinite(clone.train_on_batch(x, y, sample_weight)).all()
    clone.save(tmp_path / "clone.keras")
    keras.saving.load_model(tmp_path / "clone.keras")
    # Files of before had the arguments by themselves.
    again = type(model)(model.backbone)
    again.compile_from_config(model.get_compile_config()["config"])
    assert again.optimizer.get_config() == model.optimizer.get_config()
    assert isinstance(again.sampler, keras_hub.samplers.GreedySampler)
    assert not keras.models.clone_model(type(model)(model.backbone, compile=False)).compiled


@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="a format of TensorFlow")
def test_an_exported_program_takes_what_the_preprocessor_makes(tmp_path):
    import tensorflow as tf

    backbone = language_model("hgrn2", num_layers=1).backbone
    cls = FAMILIES["hgrn2"]
    model = cls.causal_lm(backbone, cls.preprocessor(cls.tokenizer(), sequence_length=8))
    model.export(str(tmp_path), format="tf_saved_model", verbose=False)
    x = {name: tf.cast(x, "int32") for name, x in model.preprocessor(TEXTS)[0].items()}
    program = tf.saved_model.load(str(tmp_path))
    np.testing.assert_allclose(program.serve(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.once
def test_keras_files_of_a_backbone(saved, tmp_path):
    model, _ = saved
    model.backbone.save(tmp_path / "backbone.keras")
    assert type(keras.saving.load_model(tmp_path / "backbone.keras")) is type(model.backbone)


@pytest.mark.once
@shared_by_families
def test_mixed_precision_survives(family, tmp_path):
    model = language_model(family, dtype="mixed_bfloat16")
    model.save(tmp_path / "hawk.keras")
    again = keras.saving.load_model(tmp_path / "hawk.keras")
    assert again.backbone.dtype_policy.name == "mixed_bfloat16"
    np.testing.assert_array_equal(logits(again), logits(model))


@pytest.mark.once
@shared_by_families
def test_lora_trains_its_own_weights_alone_and_saves_them(family, tmp_path):
    model = language_model(family)
    linear_maps = LORA[family]
    model.backbone.enable_lora(2)
    trainable = {weight.path.rsplit("/", 1)[1] for weight in model.trainable_weights}
    assert trainable == {"lora_kernel_a", "lora_kernel_b"}
    assert len(model.trainable_weights) == 2 * linear_maps
    before = {w.path: keras.ops.convert_to_numpy(w) for w in model.backbone.weights}
    model.compile(keras.optimizers.Adam(0.1))
    model.train_on_batch(TEXTS)
    changed = [w.path for w in model.backbone.weights if (before[w.path] != w).any()]
    assert sum("lora_kernel_b" in path for path in changed) == linear_maps
    assert all("lora_kernel" in path for path in changed)

    model.backbone.save_lora_weights(str(tmp_path / "hawk.lora.h5"))
    again = language_model(family)
    again.backbone.load_lora_weights(str(tmp_path / "hawk.lora.h5"))
    np.testing.assert_allclose(logits(again), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_beside_the_embedding(family, tmp_path):
    model = language_model(family)
    exact = logits(model)
    model.backbone.enable_lora(2, target_layer_names=["token_embedding", "o_proj"])
    np.testing.assert_allclose(logits(model), exact, rtol=1e-4, atol=1e-4)
    trainable = {weight.path.rsplit("/", 1)[1] for weight in model.trainable_weights}
    assert {"lora_embeddings_a", "lora_embeddings_b"} < trainable
    assert all("lora" in name for name in trainable)
    with pytest.raises(ValueError, match="cannot hold the low-rank weights of 'token_embedding'"):
        model.backbone.save_lora_weights(str(tmp_path / "hawk.lora.h5"))


@pytest.mark.once
@pytest.mark.parametrize("family", FAMILIES)
def test_low_rank_weights_that_were_there_before_train_on(family, tmp_path):
    model = language_model(family)
    model.backbone.token_embedding.enable_lora(3)
    model.backbone.transformer_layers[0].mlp.gate_proj.enable_lora(3)
    model.backbone.enable_lora(2, ["o_proj"])
    trainable = [weight.path for weight in model.trainable_weights]
    assert all("lora" in path for path in trainable)
    for layer in ("token_embedding", "gate_proj", "o_proj"):
        assert sum(f"{layer}/lora" in path for path in trainable) >= 2, layer
    with pytest.raises(ValueError, match="cannot hold the low-rank weights"):
        model.backbone.save_lora_weights(str(tmp_path / "hawk.lora.h5"))
    model = language_model(family)
    model.backbone.transformer_layers[0].mlp.gate_proj.enable_lora(3)
    model.backbone.enable_lora(2)
    with pytest.raises(ValueError, match="cannot hold the low-rank weights of 'gate_proj'"):
        model.backbone.save_lora_weights(str(tmp_path / "hawk.lora.h5"))


@pytest.mark.once
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_says_what_it_needs_before_it_freezes_anything(family):
    backbone = language_model(family).backbone
    wanted = len(backbone.trainable_weights)
    for arguments, match in [
        ((0,), "`rank` must be an integer, at least 1; got 0"),
        ((True,), "`rank` must be an integer, at least 1; got True"),
        ((2, "o_proj"), "`target_layer_names` must be a list of strings; got 'o_proj'"),
        ((2, []), r"`target_layer_names` must be a list of strings; got \[\]"),
        ((2, ["o_proj", "oproj"]), "`target_layer_names` must be .*'o_proj'.*; got 'oproj'"),
        ((2, ["final_norm"]), "`target_layer_names` must be .*; got 'final_norm'"),
    ]:
        with pytest.raises(ValueError, match=match):
            backbone.enable_lora(*arguments)
        assert len(backbone.trainable_weights) == wanted
    backbone.enable_lora(2, ["o_proj"])
    wanted = len(backbone.trainable_weights)
    for names in (None, ["o_proj"]):
        with pytest.raises(ValueError, match=r"`target_layer_names`: .*o_proj' has LoRA already"):
            backbone.enable_lora(2, names)
        assert len(backbone.trainable_weights) == wanted


@pytest.mark.once
@pytest.mark.parametrize("family", FAMILIES)
def test_copies_and_clones_have_no_low_rank_weights(family):
    model = language_model(family)
    count = len(model.weights)
    tied = model.backbone.token_embedding.tie_weights
    copy = type(model).from_config(model.get_config())
    copy.set_weights(model.get_weights())
    np.testing.assert_array_equal(logits(copy), logits(model))
    model.backbone.token_embedding.enable_lora(2)
    assert len(type(model).from_config(model.get_config()).weights) == count
    clone = keras.models.clone_model(model)
    # An embedding in the backbone and one for the logits; each has two tables where untied.
    assert len(clone.weights) == count + (1 if tied else 2)
    assert not any("lora" in weight.path for weight in clone.weights)


# Keras warns of every layer that a mode does not quantize, input layers included.
quiet = pytest.mark.filterwarnings(
    "ignore:Layer .* does not have a `quantize` method:UserWarning",
    "ignore:Invalid quantization mode:UserWarning",
    "ignore:.*The use of `x.T` on tensors:UserWarning",
)


@pytest.mark.once
@quiet
@shared_by_families
def test_int8_stays_near(family):
    language_model(family).quantize("int8")  # also before the preprocessor was ever called
    model = language_model(family)
    exact = logits(model)
    model.quantize("int8")
    quantized = {layer.name for layer in model._flatten_layers() if layer.quantization_mode}
    assert quantized == {"token_embedding", "gate_proj", "up_proj", "down_proj", *INT8[family]}
    error = logits(model) - exact
    assert np.sqrt((error**2).mean()) < 0.1 * np.sqrt((exact**2).mean())


def calibrated(config_class, **kwargs):
    identity, tokens = keras.layers.Identity(), [np.arange(8)]
    return config_class(tokens, identity, num_samples=1, sequence_length=8, **kwargs)


quantizers = keras.quantizers
QUANTIZED = {
    "int8": ("griffin", lambda: quantizers.Int8QuantizationConfig()),
    "int8 weights": (
        "transnormer",
        lambda: quantizers.Int8QuantizationConfig(activation_quantizer=None),
    ),
    "int4": ("griffin", lambda: quantizers.Int4QuantizationConfig(block_size=8)),
    "int4 activations": (
        "hgrn2",
        lambda: quantizers.Int4QuantizationConfig(
            block_size=None, activation_quantizer=quantizers.AbsMaxQuantizer(axis=-1)
        ),
    ),
    "float8": ("transnormer", lambda: quantizers.Float8QuantizationConfig()),
    "gptq": ("hgrn2", lambda: calibrated(quantizers.GPTQConfig, group_size=8)),
    "awq": ("griffin", lambda: calibrated(quantizers.AWQConfig, num_grid_points=1)),
}


@pytest.mark.once
@quiet
@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_models_reload_as_they_were_saved(case, tmp_path):
    """Reloaded layers quantized their inputs by default, and a bfloat16 model became float32."""
    family, config = QUANTIZED[case]
    model = language_model(family, dtype="bfloat16")
    model.quantize(config=config())
    wanted = logits(model)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(logits(again), wanted)
    again.save_to_preset(str(tmp_path / "preset"))  # a loaded model is saved once more
    again = type(model).from_preset(str(tmp_path / "preset"))
    np.testing.assert_array_equal(logits(again), wanted)
    again.save_weights(tmp_path / "model.weights.h5")
    alike = type(model).from_config(model.get_config())
    alike.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(logits(alike), wanted)
    np.testing.assert_array_equal(logits(model), wanted)  # saving changes nothing
    backbone = type(model.backbone).from_preset(str(tmp_path / "preset"))
    loaded, saved = ({w.path: w.numpy() for w in net.weights} for net in (backbone, model.backbone))
    assert loaded.keys() == saved.keys()
    assert all(np.array_equal(loaded[path], saved[path]) for path in saved)
