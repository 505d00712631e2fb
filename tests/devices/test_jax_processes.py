"""Two processes of JAX with one model: they train, save, read and write together."""

import importlib.util
import json
import os
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Keras runs in several processes on JAX alone"
)


def two_processes(folder):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }
    command = (sys.executable, "-m", "tests.devices.jax_processes")
    processes = [
        subprocess.Popen(
            [*command, str(i), str(port), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_two_processes_do_what_one_does(tmp_path):
    from tests.devices.jax_layouts import batch, make
    from tests.models.tiny import FAMILIES

    first, second = two_processes(tmp_path)
    assert first == second
    assert first["spread"]
    assert first["read"] == [True, True]
    assert first["read from shards"] in ((True,) if importlib.util.find_spec("orbax") else (None,))

    model = make("hgrn2")
    x, y, weight = batch()
    history = model.fit(x, y, sample_weight=weight, batch_size=16, verbose=0)
    saved = make("hgrn2")
    saved.load_weights(tmp_path / "all.weights.h5")
    exported = FAMILIES["hgrn2"].causal_lm.from_preset(str(tmp_path / "exported"))
    for a, b, c in zip(model.weights, saved.weights, exported.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
        np.testing.assert_array_equal(b, c)

    x, _, mask = batch()
    mask = np.arange(mask.shape[1]) < mask.sum(axis=1, keepdims=True) - 4
    prompt = {"token_ids": x["token_ids"], "padding_mask": mask}
    rows = saved.generate(prompt, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(rows, first["tokens"])
    loss, tokens = first["of parts"]
    np.testing.assert_allclose(loss, history.history["loss"][0], rtol=2e-6)
    np.testing.assert_array_equal(rows, tokens)
