"""Two processes of JAX train, save, load and generate with one model."""

import json
import os
import socket

import keras
import numpy as np
import pytest

from tests.devices.jax_layouts import generate, make_model, training_batch
from tests.devices.processes import run_processes
from tests.models.tiny import FAMILIES

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Keras runs in several processes on JAX alone"
)


def unused_port():
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        return unused.getsockname()[1]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_two_processes_match_one(tmp_path):
    """Training, saved files or generated tokens of two processes differ from those of one."""
    texts = run_processes(
        *(2, tmp_path, "jax_processes", str(unused_port())),
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2",
        JAX_ENABLE_COMPILATION_CACHE="0",
    )
    first, second = (json.loads(text.splitlines()[-1]) for text in texts)
    assert first == second
    _, loss_of_shards_of_time, tokens, _ = first

    model = make_model("hgrn2")
    x, y, weight = training_batch()
    history = model.fit(x, y, sample_weight=weight, batch_size=16, verbose=0)
    np.testing.assert_allclose(loss_of_shards_of_time, history.history["loss"][0], rtol=2e-6)
    saved = make_model("hgrn2")
    saved.load_weights(tmp_path / "all.weights.h5")
    exported = FAMILIES["hgrn2"].causal_lm.from_preset(str(tmp_path / "exported"))
    for a, b, c in zip(model.weights, saved.weights, exported.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
        np.testing.assert_array_equal(b, c)
    lengths = weight.sum(axis=1, keepdims=True) - 4
    np.testing.assert_array_equal(generate(saved, None, lengths), tokens)
