"""What an import costs, and that one framework is enough."""

import json
import os
import pathlib
import subprocess
import sys
import sysconfig

import keras_hub
import keras_nlp
import pytest

import keras_recurrent

ROOT = pathlib.Path(__file__).parents[1]
BACKEND = os.environ["KERAS_BACKEND"]
# What each framework puts into site-packages.
FRAMEWORKS = {
    "jax": {"jax", "jaxlib"},
    "torch": {"torch", "functorch", "torchgen"},
    "tensorflow": {"tensorflow", "tensorflow_text"},
}


def python(code, *options, path=()):
    """The JSON that a fresh process prints last."""
    path = os.pathsep.join(map(str, [*path, ROOT]))
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def one_framework(tmp_path_factory):
    """A folder of links to every installed package but those of the other two frameworks."""
    hidden = set().union(*(names for name, names in FRAMEWORKS.items() if name != BACKEND))
    folder = tmp_path_factory.mktemp("site-packages")
    for package in pathlib.Path(sysconfig.get_paths()["purelib"]).iterdir():
        if package.name.partition("-")[0] not in hidden and package.suffix != ".pth":
            (folder / package.name).symlink_to(package)
    return folder


def test_import_adds_no_framework_and_little_time():
    """Processor seconds, and the least of a few processes: the machine may be busy or slow."""
    for _ in range(5):
        before, after, seconds = python(
            "import json, sys, time\n"
            "import keras, keras_hub\n"
            "before, start = set(sys.modules), time.process_time()\n"
            "import keras_recurrent\n"
            "seconds = time.process_time() - start\n"
            "tops = [sorted({m.partition('.')[0] for m in s})"
            " for s in (before, set(sys.modules))]\n"
            "print(json.dumps([*tops, seconds]))"
        )
        if seconds < 1:
            break
    added = set(after) - set(before) - set(sys.stdlib_module_names)
    optional = {"triton"} if BACKEND == "torch" else set()
    assert added - optional == {"keras_recurrent"}
    assert seconds < 1


def test_one_framework_is_enough(one_framework):
    """`-S` keeps the true site-packages out of sight."""
    code = (
        "import json, sys\n"
        "import numpy as np, keras, keras_recurrent\n"
        "x = np.ones((2, 5, 16), 'float32')\n"
        "y = keras_recurrent.layers.RecurrentBlock(32)(x)\n"
        "print(json.dumps([list(y.shape), sorted({m.partition('.')[0] for m in sys.modules})]))"
    )
    shape, loaded = python(code, "-S", path=[one_framework])
    assert shape == [2, 5, 16]
    assert set(FRAMEWORKS) & set(loaded) == {BACKEND}


def test_users_of_keras_nlp_are_served():
    """`keras-nlp` is now another name for KerasHub: the same classes, so ours are theirs."""
    assert keras_nlp.models.CausalLM is keras_hub.models.CausalLM
    causal_lm = keras_nlp.models.CausalLM.from_preset("hawk_tiny")
    assert isinstance(causal_lm, keras_recurrent.models.GriffinCausalLM)
    assert isinstance(causal_lm.preprocessor, keras_nlp.models.CausalLMPreprocessor)
