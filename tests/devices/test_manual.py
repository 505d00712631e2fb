"""The training scripts of docs/devices.md run on two simulated devices."""

import os
import re
import subprocess
import sys
import textwrap

import keras
import pytest

from tests.processes import ROOT

BACKEND = keras.config.backend()


def scripts_of_the_manual():
    """The training script of this backend in docs/devices.md: data parallel, and FSDP."""
    page = (ROOT / "docs/devices.md").read_text()
    fences = re.findall(r"^( *)```py\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    programs = [textwrap.dedent(code) for _, code in fences]
    (script,) = (code for code in programs if f'["KERAS_BACKEND"] = "{BACKEND}"' in code)
    old, new = {
        "jax": ("distribution = keras.distribution.DataParallel(devices=devices)\n", programs[1]),
        "torch": ("parallel = DistributedDataParallel(module)\n", programs[3]),
    }[BACKEND]
    assert script.count(old) == 1
    return {"data parallel": script, "FSDP": script.replace(old, new)}


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND == "tensorflow", reason="the manual has no script for it")
@pytest.mark.parametrize("split", ["data parallel", "FSDP"])
def test_the_manual_trains_on_two_devices(tmp_path, split):
    """A reader who copies the script of docs/devices.md, and its lines for FSDP, trains."""
    (tmp_path / "train.py").write_text(scripts_of_the_manual()[split])
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *(launch if BACKEND == "torch" else ()), "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(number) for number in re.findall(r"loss:? ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
    assert len(list(tmp_path.iterdir())) == 2  # the script, and the weights that it saved
