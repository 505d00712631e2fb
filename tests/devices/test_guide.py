"""The guide to many devices: training at its tiny size, and its tables."""

import os
import re

import keras
import numpy as np
import pytest

from tests import scripts
from tests.devices.processes import run_script

SCRIPT = "guides/many_devices.py"
BACKEND = keras.config.backend()
SPLITS = ["rows", "weights", "heads", "time"] if BACKEND != "tensorflow" else ["rows"]
MIXED_PRECISION = ({"jax": "heads", "torch": "weights"}.get(BACKEND, "rows"), "--mixed-precision")


def run_guide(folder, *arguments):
    return run_script(SCRIPT, "--split", *arguments, "--output", str(folder))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments", [*((split,) for split in SPLITS), MIXED_PRECISION], ids=" ".join
)
def test_guide_on_several_devices_has_the_losses_of_one(tmp_path, arguments):
    """Losses differ, a device holds more than its share of weights, or no weights are saved."""
    done = run_guide(tmp_path, *arguments, "--no-tables")
    assert done.returncode == 0, done.stdout + done.stderr
    pattern = r"^Step \d: loss ([\d.]+) on one device, ([\d.]+) on all"
    one, several = np.array(re.findall(pattern, done.stdout, re.M), "float64").T
    np.testing.assert_allclose(several, one, atol=0.02 if arguments == MIXED_PRECISION else 1e-5)
    assert one[3] < one[0] - 1
    sizes = re.search(r"A device has ([\d,]+) of ([\d,]+) numbers", done.stdout).groups()
    share, whole = (int(size.replace(",", "")) for size in sizes)
    count = 8 if BACKEND == "jax" else 2
    shares = {"weights": 1 / count, "heads": 0.7, "time": 1 / count if BACKEND == "jax" else 1}
    assert whole / count <= share <= 1.05 * whole * shares.get(arguments[0], 1)
    assert any(tmp_path.iterdir())
    if BACKEND == "torch":
        loss = re.search(r"One process reads the shards: its loss is ([\d.]+)", done.stdout)
        assert float(loss[1]) < one[3]


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND != "tensorflow", reason="other backends support all splits")
def test_guide_on_tensorflow_names_the_supported_split(tmp_path):
    done = run_guide(tmp_path, "heads")
    assert done.returncode == 1
    assert "TensorFlow supports only --split rows." in done.stderr


@pytest.fixture
def guide(monkeypatch):
    # The guide changes this variable.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    return scripts.load(SCRIPT)


@pytest.mark.once
def test_tables_of_the_guide_list_plans_that_fit(guide, capsys):
    """`guides/many_devices.py` or `training_sizes` computes other bytes per device."""
    guide.memory_table()
    guide.thousand_devices()
    output = capsys.readouterr().out
    # 16 bytes a parameter; sequences of a million tokens need more than eight devices.
    assert "| 7B | 8 | 8 × 4,096 | (8, 1, 1) | 13.4 |" in output
    assert "| 15B | 8 | 1 × 1,048,576 | none |" in output
    assert "| 15B | (1024, 1, 1) | 123.46 |" in output
    assert output.count("\n| ") == 2 * 2 + 3 * (4 + 7)
    assert guide.best_plan("15B", 1, 1, 4096) is None
