"""Saved and quantized models load with equal configuration, weights and outputs."""

import json

import keras
import keras_hub
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent.models import GriffinCausalLM, HGRN2TextClassifier
from tests.checkpoints import golden
from tests.layers.table import assert_rejects, numpy
from tests.models.test_hgrn2_image_classifier import classifier as image_classifier
from tests.models.tiny import (
    FEWER_LAYERS,
    HYBRID,
    any_family,
    shared_by_families,
    tiny_backbone,
    tiny_causal_lm,
    tiny_text_model,
    two_families,
    weights_of,
)
from tests.processes import fresh_process

pytestmark = pytest.mark.once

TEXTS = ["to be", "or not"]
# Number of linear layers, in two blocks, that have low-rank weights; names of those that mix tokens
# and are quantized.
LORA = {"griffin": 3 + 4, "hgrn2": 2 * 4, "transnormer": 2 * 5, "lightning_hybrid": 4 + 5}
LORA |= {"mamba_hybrid": 5 + 4, "lfm2": 4 + 4}
INT8 = {
    "griffin": (
        *("linear_x", "linear_y", "linear_out", "recurrence_gate", "input_gate"),
        *("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "hgrn2": ("q_proj", "f_proj", "i_proj", "o_proj"),
    "transnormer": ("q_proj", "k_proj", "v_proj", "u_proj", "o_proj"),
    "lightning_hybrid": ("q_proj", "k_proj", "v_proj", "u_proj", "gate_proj", "o_proj"),
    "mamba_hybrid": (
        *("z_proj", "x_proj", "bc_proj", "dt_proj", "q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "lfm2": ("b_proj", "c_proj", "u_proj", "q_proj", "k_proj", "v_proj", "o_proj"),
}


def language_model(family="griffin", **kwargs):
    # Two blocks: in a Griffin, one of them is local attention.
    return tiny_text_model(family, {"packed": True}, **{"num_layers": 2, **kwargs})


def logits(model):
    tokens, _, _ = model.preprocessor(TEXTS)
    return numpy(keras.ops.cast(model(tokens), "float32"))


def assert_logits_close(a, b, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(logits(a), logits(b), rtol=rtol, atol=atol)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, and its directory of `save_to_preset`."""
    model = language_model("hgrn2")
    path = str(tmp_path_factory.mktemp("presets") / "hgrn2")
    model.save_to_preset(path)
    return model, path


def test_preset_directory_loads_a_model_and_its_parts_through_keras_hub_too(saved):
    model, path = saved
    for cls in (type(model), keras_hub.models.CausalLM):
        loaded = cls.from_preset(path)
        assert type(loaded) is type(model)
        assert_logits_close(loaded, model)
        assert (loaded.preprocessor.packed, loaded.preprocessor.sequence_length) == (True, 8)
    for cls in (type(model.backbone), keras_hub.models.Backbone):
        backbone = cls.from_preset(path)
        golden.assert_equal_weights(backbone, model.backbone)
    assert keras_hub.models.CausalLMPreprocessor.from_preset(path).packed
    tokenizer = keras_hub.tokenizers.Tokenizer.from_preset(path)
    assert type(tokenizer) is type(model.preprocessor.tokenizer)
    with open(f"{path}/metadata.json") as file:
        assert json.load(file)["parameter_count"] == model.backbone.count_params()


def test_from_preset_with_weights_calls_no_initializer(saved, monkeypatch):
    """Random numbers for a large embedding need several times its memory."""
    model, path = saved

    def draw(self, *arguments, **options):
        raise AssertionError("random weights")

    for name in ("RandomNormal", "RandomUniform", "TruncatedNormal", "VarianceScaling"):
        monkeypatch.setattr(getattr(keras.initializers, name), "__call__", draw)
    for cls in (type(model), type(model.backbone), keras_hub.models.CausalLM):
        cls.from_preset(path)
    golden.model()
    with pytest.raises(AssertionError, match="random weights"):
        type(model).from_preset(path, load_weights=False)


def test_from_preset_of_a_directory_applies_or_rejects_overrides(saved):
    model, path = saved
    causal_lm, backbone = type(model), type(model.backbone)
    model = causal_lm.from_preset(path, sequence_length=4, dtype="bfloat16", name="hawk")
    assert (model.preprocessor.sequence_length, model.preprocessor.packed) == (4, True)
    assert (model.backbone.dtype_policy.name, model.name) == ("bfloat16", "hawk")
    fresh = causal_lm.from_preset(path, load_weights=False, num_layers=1)
    assert len(fresh.backbone.transformer_layers) == 1
    assert_rejects("'num_layers': the weights in", causal_lm.from_preset, path, num_layers=1)
    for cls in (causal_lm, backbone):
        assert_rejects("'num_layer', which nothing takes", cls.from_preset, path, num_layer=2)
    with pytest.raises(TypeError, match="num_layer"):
        keras_hub.models.CausalLM.from_preset(path, num_layer=2)


def test_from_preset_names_missing_files(saved, tmp_path):
    model, _ = saved
    causal_lm, backbone = type(model), type(model.backbone)
    model.backbone.save_to_preset(str(tmp_path))
    for arguments in ({}, {"sequence_length": 4}):
        with pytest.raises(FileNotFoundError, match=r"only a backbone. .*`preprocessor=None`"):
            causal_lm.from_preset(str(tmp_path), **arguments)
    assert causal_lm.from_preset(str(tmp_path), preprocessor=None).preprocessor is None
    loaded = causal_lm.from_preset(str(tmp_path), preprocessor=model.preprocessor)
    np.testing.assert_array_equal(logits(loaded), logits(model))

    model.preprocessor.save_to_preset(str(tmp_path))
    (tmp_path / "model.weights.h5").unlink()
    for cls in (causal_lm, backbone):
        for load_weights in (None, True):
            with pytest.raises(FileNotFoundError, match=r"neither model.weights.h5.*load_weights="):
                cls.from_preset(str(tmp_path), load_weights)
    fresh = causal_lm.from_preset(str(tmp_path), load_weights=False)
    assert fresh.backbone.count_params() == model.backbone.count_params()


@pytest.mark.every_backend
def test_keras_file_keeps_optimizer_and_sampler(tmp_path):
    model = language_model(**FEWER_LAYERS)
    sampler = keras_hub.samplers.TopKSampler(k=3, seed=1)
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    keras_recurrent.exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer, sampler=sampler)
    model.train_on_batch(TEXTS)
    model.save(tmp_path / "hawk.keras")
    loaded = keras.saving.load_model(tmp_path / "hawk.keras")
    assert type(loaded) is GriffinCausalLM
    assert_logits_close(loaded, model)
    assert loaded.preprocessor.packed
    assert loaded.sampler.get_config() == model.sampler.get_config()
    # Keras saves what "auto" means for `fit` here, which does not decide about generation.
    assert loaded._compiles_generation is None
    for one in (model, loaded):
        one.train_on_batch(TEXTS)
    assert_logits_close(loaded, model, rtol=1e-4, atol=1e-4)


def test_compile_config_names_optimizers_by_public_modules():
    """A compile config names torch's class of an optimizer, so that loading imports torch."""
    by_path = keras.optimizers.OptimizerMap(keras.optimizers.SGD())
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    classifiers = HGRN2TextClassifier(model.backbone, num_classes=2), image_classifier()
    for optimizer in (
        keras.optimizers.Adam(),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(weight_decay=0.0)),
        keras.optimizers.MultiOptimizer(by_path),
    ):
        for one in (model, *classifiers, model.backbone):
            one.compile(optimizer, "mse")
            config = one.get_compile_config()
            assert "keras.src" not in json.dumps(config)
            arguments = config.get("config", config)
            assert "config" not in config or arguments["jit_compile"] == "auto"
            # Older files name private modules, here one that cannot be imported.
            arguments["optimizer"] = _replace_module(arguments["optimizer"])
            one.compile_from_config(config)
            assert type(one.optimizer) is type(optimizer)


def _replace_module(config):
    """Replaces the public modules of optimizers by a private one that does not exist."""
    text = json.dumps(config)
    for name in ("Adam", "AdamW", "SGD"):
        public = f'"module": "keras.optimizers", "class_name": "{name}"'
        private = public.replace("keras.optimizers", "keras.src.backend.torch.optimizers.missing")
        text = text.replace(public, private)
    assert ".missing" in text
    return json.loads(text)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "dtype", "saved_on", "loaded_on"),
    [
        ("griffin", "float32", "torch", "tensorflow"),
        ("hgrn2", "float32", "torch", "jax"),
        ("transnormer", "mixed_float16", "torch", "tensorflow"),
        ("transnormer", "mixed_float16", "jax", "torch"),
    ],
)
def test_keras_file_continues_training_on_another_backend(
    family, dtype, saved_on, loaded_on, tmp_path
):
    """A loaded file imports the first backend, or its optimizer state or compilation differs."""
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


def test_clone_has_the_optimizer_and_loss_of_the_original(tmp_path):
    model = language_model()
    model.compile(keras.optimizers.Lion(0.01), sampler="greedy")
    clone = keras.models.clone_model(model)
    assert clone.optimizer.get_config() == model.optimizer.get_config()
    assert type(clone.loss) is type(model.loss)
    x, y, sample_weight = model.preprocessor(TEXTS)
    assert np.isfinite(clone.train_on_batch(x, y, sample_weight)).all()
    clone.save(tmp_path / "clone.keras")
    keras.saving.load_model(tmp_path / "clone.keras")
    # Older files have the arguments of `compile` at the top level.
    older = type(model)(model.backbone)
    older.compile_from_config(model.get_compile_config()["config"])
    assert older.optimizer.get_config() == model.optimizer.get_config()
    assert isinstance(older.sampler, keras_hub.samplers.GreedySampler)
    assert not keras.models.clone_model(type(model)(model.backbone, compile=False)).compiled


@any_family
def test_enable_lora_freezes_all_but_low_rank_weights(family):
    backbone = tiny_backbone(family=family, num_layers=2)
    backbone.enable_lora(2)
    trainable = [weight.path.rsplit("/", 1)[1] for weight in backbone.trainable_weights]
    assert sorted(trainable) == ["lora_kernel_a"] * LORA[family] + ["lora_kernel_b"] * LORA[family]


def test_lora_trains_only_low_rank_weights_and_saves_them(tmp_path):
    model = language_model()
    model.backbone.enable_lora(2)
    before = weights_of(model.backbone)
    model.compile(keras.optimizers.Adam(0.1))
    model.train_on_batch(TEXTS)
    changed = [path for path, w in weights_of(model.backbone).items() if (before[path] != w).any()]
    assert sum("lora_kernel_b" in path for path in changed) == LORA["griffin"]
    assert all("lora_kernel" in path for path in changed)

    file = str(tmp_path / "hawk.lora.h5")
    model.backbone.save_lora_weights(file)
    loaded = language_model()
    loaded.backbone.load_lora_weights(file)
    assert_logits_close(loaded, model, rtol=1e-4)
    # KerasHub numbers the layers, and would load weights of one network into another.
    other = tiny_backbone(family="griffin", num_layers=1)
    assert_rejects("`filepath` must have low-rank weights", other.load_lora_weights, file)
    assert not any("lora" in weight.path for weight in other.weights)


def test_enable_lora_includes_keys_and_values_of_attention_in_hybrids():
    backbone = tiny_backbone(family="hgrn2", **HYBRID)
    backbone.enable_lora(2)
    adapted = {w.path.rsplit("/", 1)[0] for w in backbone.trainable_weights if "lora" in w.path}
    attention = {f"block_1/temporal_block/{name}_proj" for name in "qkvo"}
    recurrent = {f"block_{i}/temporal_block/{name}_proj" for i in (0, 2) for name in "qfio"}
    assert adapted == attention | recurrent


def test_lora_outside_of_the_default_layers_is_trainable_and_cannot_be_saved_alone(tmp_path):
    embedding, gate_proj = "token_embedding", "gate_proj"
    for alone, names, expected in (
        ([], [embedding, "o_proj"], [embedding, "o_proj"]),
        ([embedding, gate_proj], ["o_proj"], [embedding, gate_proj, "o_proj"]),
        ([gate_proj], None, [gate_proj, "o_proj"]),
    ):
        model = language_model("hgrn2")
        before, backbone = logits(model), model.backbone
        layers = {embedding: backbone.token_embedding}
        layers[gate_proj] = backbone.transformer_layers[-1].mlp.gate_proj
        for name in alone:
            layers[name].enable_lora(3)
        backbone.enable_lora(2, names)
        np.testing.assert_allclose(logits(model), before, rtol=1e-4, atol=1e-4)
        trainable = [weight.path for weight in model.trainable_weights]
        assert all("lora" in path for path in trainable)
        for name in expected:
            assert sum(f"{name}/lora" in path for path in trainable) >= 2, name
        match = "cannot hold the low-rank weights of "
        match += f"'{expected[0]}'" if len(alone) < 2 else ""
        assert_rejects(match, backbone.save_lora_weights, str(tmp_path / "hawk.lora.h5"))


def test_enable_lora_with_invalid_arguments_freezes_nothing():
    backbone = tiny_backbone(family="hgrn2", num_layers=1)
    trainable = len(backbone.trainable_weights)
    for arguments, match in [
        ((0,), "`rank` must be an integer, at least 1; got 0"),
        ((True,), "`rank` must be an integer, at least 1; got True"),
        ((2, "o_proj"), "`target_layer_names` must be a list of strings; got 'o_proj'"),
        ((2, []), r"`target_layer_names` must be a list of strings; got \[\]"),
        ((2, ["o_proj", "oproj"]), "`target_layer_names` must be .*'o_proj'.*; got 'oproj'"),
        ((2, ["final_norm"]), "`target_layer_names` must be .*; got 'final_norm'"),
    ]:
        assert_rejects(match, backbone.enable_lora, *arguments)
        assert len(backbone.trainable_weights) == trainable
    backbone.enable_lora(2, ["o_proj"])
    trainable = len(backbone.trainable_weights)
    for names in (None, ["o_proj"]):
        match = r"`target_layer_names`: .*o_proj' has LoRA already"
        assert_rejects(match, backbone.enable_lora, 2, names)
        assert len(backbone.trainable_weights) == trainable


@two_families
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


@shared_by_families
def test_int8_quantizes_all_linear_layers_and_approximates_logits(family):
    model = language_model(family)
    exact = logits(model)
    model.quantize("int8")
    quantized = {layer.name for layer in model._flatten_layers() if layer.quantization_mode}
    assert quantized == {"token_embedding", "gate_proj", "up_proj", "down_proj", *INT8[family]}
    error = logits(model) - exact
    assert np.sqrt((error**2).mean()) < 0.1 * np.sqrt((exact**2).mean())


@any_family
def test_quantization_structure_gives_each_block_its_activations(family):
    """GPTQ and AWQ calibrate on other activations than those of a forward pass."""
    kwargs = {"embedding_scale": 4.0} if family == "griffin" else {}
    model, token_ids = tiny_causal_lm(family=family, **kwargs), np.arange(12)[None]
    structure, expected = model.get_quantization_layer_structure("gptq"), []
    (embed,), blocks = structure["pre_block_layers"], structure["sequential_blocks"]
    found = [embed(token_ids)]
    for block in blocks:
        found.append(block(found[-1]))
    model.score(token_ids, layer_intercept_fn=lambda x, i: expected.append(x) or x)
    keras.tree.map_structure(np.testing.assert_array_equal, numpy(found), numpy(expected))
    assert model.get_quantization_layer_structure("int8") is None


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


@pytest.mark.filterwarnings("ignore:Invalid quantization mode:UserWarning")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.nightly] if case in ("float8", "awq") else [])
        for case in QUANTIZED
    ],
)
def test_quantized_models_give_equal_logits_after_loading(case, tmp_path):
    """A loaded model quantizes its inputs by default, or a bfloat16 model becomes float32."""
    family, config = QUANTIZED[case]
    model, path = language_model(family, dtype="bfloat16", num_layers=1), str(tmp_path / "preset")
    model.quantize(config=config())
    expected = logits(model)
    model.save(tmp_path / "model.keras")
    from_file = keras.saving.load_model(tmp_path / "model.keras")
    from_file.save_to_preset(path)  # a loaded model is saved once more
    from_preset = type(model).from_preset(path)
    from_preset.save_weights(tmp_path / "model.weights.h5")
    from_weights = type(model).from_config(model.get_config())
    from_weights.load_weights(tmp_path / "model.weights.h5")
    for one in (from_file, from_preset, from_weights, model):  # saving does not change a model
        np.testing.assert_array_equal(logits(one), expected)
    backbone = weights_of(type(model.backbone).from_preset(path))
    expected = weights_of(model.backbone)
    assert backbone.keys() == expected.keys()
    assert all(np.array_equal(backbone[path], expected[path]) for path in expected)
