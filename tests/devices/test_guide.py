"""The guide to many devices runs, at its tiny size, and what it plans on paper adds up."""

import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests import scripts
from tests.processes import ROOT

SCRIPT = "guides/many_devices.py"
BACKEND = keras.config.backend()
QUICK = {"jax": "heads", "torch": "weights", "tensorflow": "rows"}[BACKEND]
OTHERS = [split for split in ("rows", "weights", "heads", "time") if split != QUICK]
SLOW = [] if BACKEND == "tensorflow" else [(split,) for split in OTHERS]
SLOW += [(QUICK, "--mixed-precision")]
ALWAYS = [(QUICK,)]
if BACKEND == "torch":  # three processes in turn import torch and Keras
    ALWAYS, SLOW = [], [(QUICK,), *SLOW]


def run(tmp_path, *arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, "--split", *arguments, "--output", str(tmp_path)],
        cwd=ROOT,
        # torch on the CPU has fewer threads than processes would take, and no GPU is needed.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments", [*ALWAYS, *(pytest.param(a, marks=pytest.mark.nightly) for a in SLOW)]
)
def test_many_devices_learn_what_one_learns(tmp_path, arguments):
    done = run(tmp_path, *arguments, "--no-tables")
    assert done.returncode == 0, done.stdout + done.stderr
    mixed = "--mixed-precision" in arguments
    losses = re.findall(
        r"^Step \d: loss ([\d.]+) on one device, ([\d.]+) on all", done.stdout, re.M
    )
    one, many = np.array(losses, "float64").T
    np.testing.assert_allclose(many, one, atol=0.02 if mixed else 1e-5)
    assert one[3] < one[0] - 1  # it learns
    own, whole = re.search(r"A device has ([\d,]+) of ([\d,]+) numbers", done.stdout).groups()
    own, whole = (int(number.replace(",", "")) for number in (own, whole))
    count = 8 if BACKEND == "jax" else 2
    shares = {"weights": 1 / count, "heads": 0.7, "time": 1 / count if BACKEND == "jax" else 1}
    assert whole / count <= own <= 1.05 * whole * shares.get(arguments[0], 1)
    assert any(tmp_path.iterdir())
    if BACKEND == "torch":
        loss = re.search(r"One process reads the shards: its loss is ([\d.]+)", done.stdout)
        assert float(loss[1]) < one[3]


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND != "tensorflow", reason="others split all")
def test_tensorflow_says_what_it_does_not_split(tmp_path):
    done = run(tmp_path, "heads")
    assert done.returncode == 1
    assert "TensorFlow supports only --split rows." in done.stderr


@pytest.fixture
def guide(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which it changes
    return scripts.load(SCRIPT)


@pytest.mark.once
def test_plans_are_sums(guide):
    """Of 1.3B on 1,024 devices: what FSDP moves, and how long that and arithmetic take."""
    n = 1_364_396_032
    plan = guide.Plan("1.3B", guide.Mesh(1024, 1, 1), 1024, 4096)
    moved = {what: number for what, number in plan.bytes_moved().items() if number}
    assert moved == {("weights", "data"): 8 * n * 1023 / 1024}
    assert plan.seconds() == {
        "arithmetic": pytest.approx(8 * n * 4096 / 400e12),
        "weights": pytest.approx(8 * n * 1023 / 1024 / 50e9),
    }
    assert plan.step() == plan.seconds()["weights"]
    # Heads over a host: activations by NVLink, weights by the slower links, an eighth of them.
    both = guide.Plan("1.3B", guide.Mesh(128, 1, 8), 1024, 4096)
    seconds = both.seconds()
    assert seconds["arithmetic"] == pytest.approx(plan.seconds()["arithmetic"])
    assert seconds["weights"] == pytest.approx(n * 127 / 128 / 50e9)
    sums = 24 * 6 * 2 * 7 / 8 * (8 * 4096 * 2048 * 2)
    assert seconds["activations"] == pytest.approx(sums / 450e9)
    assert both.step() == pytest.approx(seconds["arithmetic"] + seconds["activations"])


@pytest.mark.once
def test_states_grow_with_devices_and_not_with_rows(guide):
    def states(mesh, length):
        return guide.Plan("1.3B", mesh, 1, length).bytes_moved()["states", "sequence"]

    assert states(guide.Mesh(1, 8, 1), 2**15) == states(guide.Mesh(1, 8, 1), 2**20)
    assert 5 * states(guide.Mesh(1, 8, 1), 2**20) == 4 * states(guide.Mesh(1, 16, 1), 2**20)


@pytest.mark.once
def test_the_tables(guide, capsys):
    guide.memory_table()
    guide.thousand_devices()
    written = capsys.readouterr().out
    # 16 bytes a parameter; rows of a million tokens ask for more than eight devices.
    assert "| 7B | 8 | 8 × 4,096 | (8, 1, 1) | 13.4 |" in written
    assert "| 15B | 8 | 1 × 1,048,576 | none |" in written
    assert "| 15B | (1024, 1, 1) | 123.46 |" in written
    assert written.count("\n| ") == 2 * 2 + 3 * (4 + 7)
    assert guide.best_plan("15B", 1, 1, 4096) is None
