"""Tiny checkpoints in the published layouts, compared with outputs of independent programs.

`golden.npz` holds logits, loss and a greedy continuation, from the recurrence in float64, token by
token, or from the original programs in float32, with gradients and padded rows. RecurrentGemma,
whose golden file has more, is in `test_recurrent_gemma.py`.
"""

import json

import keras
import keras_hub
import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file

from keras_recurrent.checkpoints import layout
from tests.checkpoints import golden
from tests.layers import gradients

# The root mean square of float32's roundings, relative; mistakes show at 1e-4 and above.
ROUNDING = 1.5e-6
DATA = golden.PATH.parent
NAMES = ["transnormer_tiny", "hgrn2_hybrid_tiny", "hypenet_tiny", "minicpm_sala_tiny"]


@pytest.fixture(scope="module", params=NAMES)
def path(request):
    return DATA / request.param


@pytest.fixture(scope="module")
def model(path):
    return load(path)


@pytest.fixture(scope="module")
def wanted(path):
    with np.load(path / "golden.npz") as file:
        return dict(file)


def load(path, **kwargs):
    return keras_hub.models.CausalLM.from_preset(str(path), **kwargs)


def test_logits(model, wanted):
    found = golden.logits(model, wanted["token_ids"])
    assert golden.relative(found, wanted["logits"]) < ROUNDING


@pytest.mark.once
def test_logits_from_a_cache(model, wanted):
    """In portions; the cache's rounding is no larger."""
    token_ids, found = wanted["token_ids"], []
    cache = model.backbone.get_initial_state(len(token_ids), token_ids.shape[1])
    for portion in np.array_split(token_ids, 3, axis=1):
        logits, _, cache = model.call_with_cache(portion, cache)
        found.append(keras.ops.convert_to_numpy(logits))
    assert golden.relative(np.concatenate(found, axis=1), wanted["logits"]) < ROUNDING


def test_gradients(model, wanted):
    """Of the mean loss, by the original's own backward pass."""
    if not any(name.startswith("grad/") for name in wanted):
        pytest.skip("the file has no gradients")
    tensors = layout.get_layout(model.backbone).tensors(model.backbone.get_config())
    tensors = {tensor.name: tensor for tensor in tensors}
    paths = [weight.path for weight in model.trainable_variables]
    found = dict(zip(paths, gradients_of_loss(model, wanted), strict=True))
    for name in (name for name in wanted if name.startswith("grad/")):
        tensor = tensors[name.removeprefix("grad/")]
        (path,), (gradient,) = tensor.weights, tensor.transform.to_weights(wanted[name])
        error = np.abs(found[path] - gradient).max() / np.abs(gradient).max()
        assert error < 3e-5, name


def gradients_of_loss(model, wanted):
    token_ids = wanted["token_ids"]

    def loss(values):
        x = golden.inputs(token_ids[:, :-1])
        logits = gradients.call_with(model, values, x)
        losses = keras.losses.sparse_categorical_crossentropy(token_ids[:, 1:], logits, True)
        return keras.ops.mean(losses)

    values = [keras.ops.convert_to_numpy(weight) for weight in model.trainable_variables]
    return gradients.gradients(loss, values)


@pytest.mark.once
def test_padded_rows(model, wanted):
    """Left padding, as the original unpads it; HypeNet's own code ignores the mask."""
    if "padded_logits" in wanted:
        real = wanted["padded_mask"] > 0
        x = {"token_ids": wanted["padded_token_ids"], "padding_mask": wanted["padded_mask"]}
        found = keras.ops.convert_to_numpy(model.predict_on_batch(x))
        assert golden.relative(found[real], wanted["padded_logits"][real]) < ROUNDING


@pytest.mark.once
def test_scaled_logits(path, wanted):
    """HypeNet's logits of attention grow with the position if asked for."""
    if "scaled/logits" in wanted:
        a = float(str(wanted["scaled/attn_logits_scaling"]).split()[-1])
        found = golden.logits(load(path, attention_logit_scaling=a), wanted["token_ids"])
        assert golden.relative(found, wanted["scaled/logits"]) < ROUNDING


@pytest.mark.once
def test_loss(model, wanted):
    token_ids = wanted["token_ids"]
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    loss = model.test_on_batch(golden.inputs(token_ids[:, :-1]), token_ids[:, 1:])
    np.testing.assert_allclose(np.ravel(loss)[0], wanted["loss"], rtol=3e-7)


@pytest.mark.once
def test_greedy_continuation(model, wanted):
    prompt_length, written = int(wanted["greedy_prompt_length"]), wanted["greedy_token_ids"]
    given = np.broadcast_to(np.arange(written.shape[1]) < prompt_length, written.shape)
    model.compile(sampler="greedy")
    prompt = {"token_ids": np.where(given, written, 0), "padding_mask": given}
    found = model.generate(prompt, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(found, written)


@pytest.mark.once
def test_a_round_trip_keeps_every_bit(model, path, tmp_path):
    model.export_to_transformers(tmp_path / "export")
    original = load_file(path / "model.safetensors")
    assert_same_tensors(tmp_path / "export", original, "float32")
    of_family = layout.get_layout(model.backbone)
    arguments = [
        of_family.backbone_arguments(json.loads((folder / "config.json").read_text()), "a config")
        for folder in (path, tmp_path / "export")
    ]
    assert arguments[0] == arguments[1]
    assert arguments[0].items() <= model.backbone.get_config().items()


@pytest.mark.once
def test_bfloat16_comes_and_goes_as_it_is(model, path, tmp_path):
    model.export_to_transformers(tmp_path / "narrow", dtype="bfloat16")
    original = load_file(path / "model.safetensors")
    narrow = {name: array.astype(bfloat16) for name, array in original.items()}
    assert_same_tensors(tmp_path / "narrow", narrow, bfloat16)
    load(tmp_path / "narrow", dtype="bfloat16").export_to_transformers(tmp_path / "again")
    assert_same_tensors(tmp_path / "again", narrow, bfloat16)


def assert_same_tensors(folder, wanted, dtype):
    found = load_file(folder / "model.safetensors")
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == dtype, name
        assert found[name].tobytes() == array.astype(dtype).tobytes(), name


@pytest.mark.once
def test_every_weight_has_its_tensor(model):
    tensors = layout.get_layout(model.backbone).tensors(model.backbone.get_config())
    shapes = {w.path: tuple(w.shape) for w in model.backbone.weights}
    paths = [path for tensor in tensors for path in tensor.weights]
    assert sorted(paths) == sorted(shapes)
    for tensor in tensors:
        values = tensor.transform.to_weights(np.zeros(tensor.shape))
        assert [v.shape for v in values] == [shapes[path] for path in tensor.weights]
