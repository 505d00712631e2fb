"""The scripts of docs/machines.md as two hosts, one of which loses its process."""

import os
import pydoc_data.topics
import re
import textwrap

import h5py
import keras
import numpy as np
import pytest

from tests.devices.processes import run_script, run_until_failure
from tests.devices.test_jax_processes import unused_port
from tests.processes import ROOT

BACKEND = keras.config.backend()
KILL = "os.kill(os.getpid(), 9)"
HOSTS = 2

pytestmark = pytest.mark.nightly


def script_of(backend):
    page = (ROOT / "docs/machines.md").read_text()
    fences = re.findall(r"^ *```py\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    (script,) = (code for code in fences if f'["KERAS_BACKEND"] = "{backend}"' in code)
    return textwrap.dedent(script)


def insert(script, before, line):
    """Inserts a line, indented as the text before which it is inserted."""
    result, count = re.subn(f"^( *)({re.escape(before)})", rf"\1{line}\n\1\2", script, flags=re.M)
    assert count == 1
    return result


def make_run(folder, script):
    """Makes a working directory with the script and a corpus of two files."""
    (folder / "corpus").mkdir(parents=True)
    (folder / "train.py").write_text(script)
    documents = [" ".join(text.split()) for text in pydoc_data.topics.topics.values()]
    for i in range(HOSTS):
        (folder / f"corpus/{i}.txt").write_text("\n".join(documents[i:40:HOSTS]))


def python_path():
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def run_jax(folder):
    """Returns the exit codes and outputs of both processes."""
    port = str(unused_port())
    environment = {
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"localhost:{port}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(HOSTS),
    }
    environments = [{**environment, "KERAS_DISTRIBUTION_PROCESS_ID": str(i)} for i in range(HOSTS)]
    return run_until_failure([["train.py"]] * HOSTS, folder, environments, cwd=folder)


@pytest.mark.skipif(BACKEND != "jax", reason="the script is of JAX")
def test_killed_jax_run_resumes_with_equal_losses(tmp_path):
    """Processes resume at other weights, or at another position in their own files.

    The second of two processes is killed after the second save in the second epoch.
    """
    script = script_of("jax")
    killing = insert(script, "model.fit(", "steps = iter(range(100))")
    kill = f"lambda batch, logs: rank == 1 and next(steps) == 7 and {KILL}"
    killing = killing.replace(
        "callbacks=[backup]",
        f"callbacks=[backup, keras.callbacks.LambdaCallback(on_train_batch_begin={kill})]",
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    make_run(whole, script)
    codes, expected = run_jax(whole)
    assert codes == [0, 0], expected
    make_run(killed, killing)
    codes, texts = run_jax(killed)
    assert codes[1] == -9, texts
    assert codes[0] != 0
    (killed / "train.py").write_text(script)
    codes, texts = run_jax(killed)
    assert codes == [0, 0], texts

    def last_losses(texts):
        return [re.findall(r"loss: ([\d.]+)", text)[-2:] for text in texts]

    assert last_losses(texts) == last_losses(expected)
    assert len(re.findall("^Epoch", texts[0], re.MULTILINE)) == 2  # of three
    assert not (killed / "run.backup").exists()
    keras.tree.map_structure(
        np.testing.assert_array_equal, *(read_weights(run) for run in (whole, killed))
    )


def read_weights(folder):
    """Returns `{name: array}` of all weights and optimizer slots."""
    arrays = {}

    def add(name, item):
        if isinstance(item, h5py.Dataset):
            arrays[name] = item[()]

    with h5py.File(folder / "model.weights.h5") as file:
        file.visititems(add)
    assert arrays
    return arrays


@pytest.mark.skipif(BACKEND != "torch", reason="the script is of torch")
def test_torchrun_restarts_killed_run_with_equal_losses(tmp_path):
    """The agents of both hosts do not restart, or weights, slots or data differ afterwards.

    The second of two processes is killed between two saves.
    """
    script = script_of("torch")
    once = '(folder / "killed").exists() and not (folder / "killed").unlink()'
    kill = f"if (rank, step) == (1, 6) and {once}: {KILL}"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    make_run(whole, script)
    launch = ("-m", "torch.distributed.run", "--max-restarts=1")
    done = run_script(*launch, "--standalone", f"--nproc-per-node={HOSTS}", "train.py", cwd=whole)
    assert done.returncode == 0, done.stderr
    make_run(killed, insert(script, "x, y, sample_weight =", kill))
    (killed / "killed").touch()
    command = [*launch, f"--nnodes={HOSTS}", "--nproc-per-node=1", "--local-addr=localhost"]
    command += ["--rdzv-id=run", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint=localhost:{unused_port()}", "train.py"]
    environment = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as on the page
    codes, texts = run_until_failure([command] * HOSTS, killed, [environment] * HOSTS, cwd=killed)
    assert codes == [0] * HOSTS, texts

    def losses(text):
        return re.findall(r"step (\d+): loss ([\d.]+)", text)

    expected = losses(done.stdout)
    assert len(expected) == 12
    steps = [pair for text in texts for pair in losses(text)]
    assert set(steps) == set(expected)
    assert len(steps) == 12 + 2  # steps 5 and 6 twice
