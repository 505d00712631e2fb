"""The training scripts of docs/devices.md run on two simulated devices."""

import re
import textwrap

import keras
import pytest

from tests.devices.processes import run_script
from tests.processes import ROOT

BACKEND = keras.config.backend()


def training_scripts():
    """Returns this backend's script in docs/devices.md: data parallel, and changed to FSDP."""
    page = (ROOT / "docs/devices.md").read_text()
    fences = re.findall(r"^( *)```py\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    programs = [textwrap.dedent(code) for _, code in fences]
    (script,) = (code for code in programs if f'["KERAS_BACKEND"] = "{BACKEND}"' in code)
    line, fsdp = {
        "jax": (r"distribution = keras\.distribution\.DataParallel\(.*\)\n", programs[1]),
        "torch": (r"parallel = DistributedDataParallel\(.*\)\n", programs[3]),
    }[BACKEND]
    fsdp_script, count = re.subn(line, fsdp, script)
    assert count == 1
    return {"data parallel": script, "FSDP": fsdp_script}


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND == "tensorflow", reason="the manual has no script for it")
@pytest.mark.parametrize("split", ["data parallel", "FSDP"])
def test_script_of_the_manual_trains_on_two_devices(tmp_path, split):
    """A reader who copies the script of docs/devices.md gets no trained and saved model."""
    (tmp_path / "train.py").write_text(training_scripts()[split])
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run_script(
        *(launch if BACKEND == "torch" else ()),
        "train.py",
        cwd=tmp_path,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(number) for number in re.findall(r"loss:? ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
    assert len(list(tmp_path.iterdir())) == 2  # the script, and the weights that it saved
