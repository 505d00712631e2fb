"""Tiny checkpoints in the published layouts, with outputs of independent programs.

Each folder `tests/data/*_tiny` has a `golden.npz`. That of RecurrentGemma, the default here, was
made with DeepMind's recurrentgemma 1.0.1 on torch, in float32.
"""

import json
import pathlib
import shutil

import keras
import numpy as np
from safetensors.numpy import load_file, save_file

from keras_recurrent.models import GriffinCausalLM
from tests.layers import gradients

DATA = pathlib.Path(__file__).parents[1] / "data"
PATH = DATA / "recurrentgemma_tiny"
TENSORS = PATH / "model.safetensors"


def arrays(path=PATH):
    with np.load(path / "golden.npz") as file:
        return dict(file)


def read_config(folder=PATH):
    return json.loads((folder / "config.json").read_text())


def read_tensors(folder):
    """Returns the tensors of all files of a checkpoint."""
    return {name: a for file in folder.glob("*.safetensors") for name, a in load_file(file).items()}


def model(path=PATH, **kwargs):
    return GriffinCausalLM.from_preset(str(path), **kwargs)


def inputs(token_ids, **more):
    return {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids), **more}


def logits(model, token_ids, **more):
    return keras.ops.convert_to_numpy(model.predict_on_batch(inputs(token_ids, **more)))


def loss_gradients(model, token_ids):
    """Returns {path of a weight: gradient of the mean cross-entropy}."""

    def loss(values):
        logits = gradients.call_with(model, values, inputs(token_ids[:, :-1]))
        losses = keras.losses.sparse_categorical_crossentropy(token_ids[:, 1:], logits, True)
        return keras.ops.mean(losses)

    values = [keras.ops.convert_to_numpy(weight) for weight in model.trainable_variables]
    paths = [weight.path for weight in model.trainable_variables]
    return dict(zip(paths, gradients.gradients(loss, values), strict=True))


def relative_error(actual, expected):
    """Root mean square of the error, relative to that of the expected values."""
    error = actual.astype("float64") - expected
    return np.sqrt((error**2).mean() / (expected.astype("float64") ** 2).mean())


def assert_tensors(folder, expected, dtype):
    """Asserts that the checkpoint has exactly these tensors, bit by bit, in this dtype."""
    actual = read_tensors(folder)
    assert set(actual) == set(expected)
    for name, array in expected.items():
        assert actual[name].dtype == dtype, name
        assert actual[name].tobytes() == array.astype(dtype).tobytes(), name


def assert_equal_weights(actual, expected):
    for a, b in zip(actual.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def copy(folder, config=None, tensors=None, drop=(), files=None):
    """Copies the checkpoint, with other configuration keys and tensors (None removes a tensor).

    `files` are further ones, `{name: bytes, text or JSON}`.
    """
    folder.mkdir(exist_ok=True)
    content = {key: v for key, v in {**read_config(), **(config or {})}.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(content))
    if tensors is None:
        shutil.copy(TENSORS, folder)
    else:
        changed = {**load_file(TENSORS), **tensors}
        kept = {name: array for name, array in changed.items() if array is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in (files or {}).items():
        if not isinstance(content, bytes):
            content = (content if isinstance(content, str) else json.dumps(content)).encode()
        (folder / name).write_bytes(content)
    return folder
