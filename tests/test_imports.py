"""`import keras_recurrent`: its time, the modules it loads, and a single installed framework."""

import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import sysconfig
import types
import warnings

import keras
import keras_hub
import pytest

import keras_recurrent
from keras_recurrent import import_order, upstream
from tests.processes import ROOT, fresh_process, run_python

BACKEND = os.environ["KERAS_BACKEND"]
FRAMEWORKS = {  # and the packages that each one installs
    "jax": {"jax", "jaxlib"},
    "torch": {"torch", "functorch", "torchgen"},
    "tensorflow": {"tensorflow", "tensorflow_text"},
}
ALL_ON_TORCH = BACKEND == "torch" and all(map(importlib.util.find_spec, ("tensorflow", "triton")))


def failing_import(*command, **environment):
    """Returns the last line of the error of a process of Python that must fail."""
    done = run_python(*command, **environment)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def one_framework(tmp_path_factory):
    """A folder of links to all installed packages except those of the other two frameworks."""
    hidden = set().union(*FRAMEWORKS.values()) - FRAMEWORKS[BACKEND]
    folder = tmp_path_factory.mktemp("site-packages")
    for package in pathlib.Path(sysconfig.get_paths()["purelib"]).iterdir():
        if package.name.partition("-")[0] not in hidden and package.suffix != ".pth":
            (folder / package.name).symlink_to(package)
    return folder


@pytest.mark.nightly
def test_import_of_a_layer_loads_no_other_framework_in_a_second():
    """Processor seconds of an import, the least of several processes: the machine may be busy."""
    for _ in range(5):
        before, after, seconds = fresh_process(
            "-c",
            "import json, sys, time\n"
            "import keras\n"
            "before, start = set(sys.modules), time.process_time()\n"
            "from keras_recurrent.layers import RGLRU\n"
            "seconds = time.process_time() - start\n"
            "tops = [sorted({m.partition('.')[0] for m in s})"
            " for s in (before, set(sys.modules))]\n"
            "print(json.dumps([*tops, seconds]))",
        )
        if seconds < 1:
            break
    added = set(after) - set(before) - set(sys.stdlib_module_names)
    optional = set() if BACKEND == "tensorflow" else {"triton"}
    assert added - optional == {"keras_recurrent"}
    assert seconds < 1


@pytest.mark.nightly
@pytest.mark.once
def test_kerashub_imported_first_finds_the_presets():
    """KerasHub does not find this package's presets if it is imported before this package.

    On torch, KerasHub may import TensorFlow before this package, as it imports Keras before that.
    """
    names, imported, kind, tokenizer = fresh_process(
        "-c",
        "import json, sys\n"
        "import keras_hub\n"
        "import keras_recurrent\n"
        "imported = 'keras_recurrent.models' in sys.modules\n"
        "models = keras_hub.models\n"
        "names = sorted(models.CausalLM.presets)\n"
        "kind = type(models.Backbone.from_preset('hawk_tiny', load_weights=False)).__name__\n"
        "tokenizer = keras_hub.tokenizers.Tokenizer.from_preset('hawk_tiny')\n"
        "print(json.dumps([names, imported, kind, type(tokenizer).__name__]))",
    )
    assert {"hawk_tiny", "bert_base_en", "gemma_2b_en"} - set(names) == {"bert_base_en"}
    assert not imported
    assert (kind, tokenizer) == ("GriffinBackbone", "GriffinTokenizer")


@pytest.mark.once
def test_hub_finder_changes_kerashub_at_each_import(monkeypatch):
    """KerasHub does not find this package's presets if it is imported after this package."""
    replaced = []
    monkeypatch.setattr(upstream, "_change_hub", lambda: replaced.append(True))
    finder = next(f for f in sys.meta_path if type(f).__name__ == "_HubFinder")
    assert finder.find_spec("keras", None) is None
    for count in (1, 2):
        spec = finder.find_spec("keras_hub", None)
        module = importlib.util.module_from_spec(spec)
        assert len(replaced) == count - 1
        spec.loader.exec_module(module)
        assert len(replaced) == count
        assert type(module.__loader__) is type(spec.loader) is type(keras.__loader__)
        assert module.models is keras_hub.models


@pytest.mark.once
def test_registered_name_imports_the_module_of_its_class(monkeypatch):
    """A `.keras` file of a language model does not load unless its class was imported."""
    name, cls = "keras_recurrent>GriffinCausalLM", keras_recurrent.models.GriffinCausalLM
    objects, imported = keras.saving.get_custom_objects(), []
    monkeypatch.delitem(objects, name)

    def import_module(module):
        imported.append(module)
        if module == upstream.MODELS:
            objects[name] = cls

    importer = types.SimpleNamespace(import_module=import_module)
    monkeypatch.setattr(upstream, "importlib", importer)
    assert keras.saving.get_registered_object("another>GriffinCausalLM") is None
    assert imported == []
    assert keras.saving.get_registered_object(name) is cls
    assert imported[-1] == upstream.MODELS
    assert keras.saving.get_registered_object("keras_recurrent>Missing") is None


@pytest.mark.once
def test_import_of_backends_at_top_level_raises():
    """`import backends` would make a second module object of each file."""
    with pytest.raises(ImportError, match=r"`keras_recurrent\.backends`, not `backends`"):
        importlib.import_module("backends")
    assert not [m for m in sys.modules if m.partition(".")[0] in ("backends", "presets")]


@pytest.fixture
def crashing_imports(monkeypatch):
    """Imported modules with which Keras on torch crashes, as `check_import_order` sees them."""
    modules = {k: v for k, v in sys.modules.items() if k not in ("keras", "triton")}
    modules["tensorflow"] = types.ModuleType("tensorflow")
    monkeypatch.setattr(import_order.sys, "modules", modules)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setattr(import_order.importlib.metadata, "version", lambda package: "3.7.1")
    return modules


@pytest.mark.once
@pytest.mark.parametrize("gpu", [True, False])
def test_warn_about_disabled_kernels_warns_with_a_gpu_only(crashing_imports, monkeypatch, gpu):
    """TensorFlow before Triton disables kernels on JAX without a warning."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    crashing_imports["jax_cuda13_plugin"] = types.ModuleType("jax_cuda13_plugin")
    monkeypatch.setattr(import_order.os.path, "exists", lambda path: gpu)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import_order.warn_about_disabled_kernels()
    assert ["Import keras_recurrent first" in str(w.message) for w in caught] == [True] * gpu


def raise_not_found(package):
    raise importlib.metadata.PackageNotFoundError(package)


@pytest.mark.once
@pytest.mark.parametrize(
    "change",
    [
        lambda modules, patch: modules.pop("tensorflow"),
        lambda modules, patch: modules.update(triton=types.ModuleType("triton")),
        lambda modules, patch: patch.setenv("KERAS_BACKEND", "jax"),
        lambda modules, patch: patch.setattr(importlib.metadata, "version", lambda p: "3.6.0"),
        lambda modules, patch: patch.setattr(importlib.metadata, "version", raise_not_found),
    ],
    ids=["no tensorflow", "triton first", "another backend", "older triton", "no triton"],
)
def test_check_import_order_raises_only_where_keras_crashes(crashing_imports, monkeypatch, change):
    with pytest.raises(ImportError, match=r"triton 3.7.1.*Import keras_recurrent before tensorfl"):
        import_order.check_import_order()
    change(crashing_imports, monkeypatch)
    import_order.check_import_order()


@pytest.mark.once
def test_keras_backend_reads_the_environment_and_keras_json(
    crashing_imports, monkeypatch, tmp_path
):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    assert import_order.keras_backend() == "torch"
    monkeypatch.delenv("KERAS_BACKEND")
    assert import_order.keras_backend() == "tensorflow"
    for content, backend in [
        ('{"backend": "jax"}', "jax"),
        ("{}", "tensorflow"),
        ("", "tensorflow"),
    ]:
        (tmp_path / "keras.json").write_text(content)
        assert import_order.keras_backend() == backend
    crashing_imports["keras"] = keras  # the backend that runs, whatever is configured
    assert import_order.keras_backend() == BACKEND


@pytest.mark.nightly
@pytest.mark.once
@pytest.mark.parametrize(
    ("backend", "installed", "match"),
    [
        (None, ("jax", "torch"), r"'tensorflow', which is not installed \(KERAS_BACKEND is not s"),
        ("jax", ("torch",), r"'jax', which is not installed.*KERAS_BACKEND to 'torch', installed"),
        ("pytorch", ("torch", "jax"), r"'pytorch', which is not a backend.* to 'jax' or 'torch'"),
        ("torch", (), r"'torch', which is not installed.*extra `jax` .*, or pip install jax"),
        ("tensorflow", ("tensorflow",), None),
        ("numpy", (), None),
    ],
)
def test_check_backend_names_missing_and_installed_backends(
    monkeypatch, tmp_path, backend, installed, match
):
    frameworks = (*import_order.FRAMEWORKS, "keras")
    modules = {name: module for name, module in sys.modules.items() if name not in frameworks}
    monkeypatch.setattr(import_order.sys, "modules", modules)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND")
    if backend is not None:
        monkeypatch.setenv("KERAS_BACKEND", backend)
    found = {name: object() for name in installed}
    monkeypatch.setattr(import_order.importlib.util, "find_spec", found.get)
    if match is None:
        import_order.check_backend()
        return
    with pytest.raises(ImportError, match=match):
        import_order.check_backend()


@pytest.mark.nightly
def test_import_with_a_missing_backend_says_which_one_is_installed(one_framework):
    """Keras fails with an error that does not name the remedy."""
    missing = next(name for name in FRAMEWORKS if name != BACKEND)
    path = os.pathsep.join([str(one_framework), str(ROOT)])
    # `-S` hides the real site-packages.
    command = "-S", "-c", "import keras_recurrent"
    error = failing_import(*command, PYTHONPATH=path, KERAS_BACKEND=missing)
    assert error.startswith(f"ImportError: Keras would run on {missing!r}, which is not installed")
    assert f"Set the environment variable KERAS_BACKEND to {BACKEND!r}" in error


@pytest.mark.nightly
@pytest.mark.skipif(not ALL_ON_TORCH, reason="needs torch with TensorFlow and triton installed")
def test_import_after_tensorflow_on_torch_raises_unless_triton_is_imported():
    """TensorFlow imports Keras, which crashes on torch; with Keras 2 as its Keras it does not."""
    error = failing_import("-c", "import tensorflow, keras_recurrent", TF_USE_LEGACY_KERAS="1")
    assert "ImportError: TensorFlow was imported before triton" in error
    assert fresh_process("-c", "import triton, tensorflow, keras_recurrent\nprint(1)") == 1


@pytest.mark.nightly
def test_layer_runs_with_a_single_framework_installed(one_framework):
    code = (
        "import json, sys\n"
        "import numpy as np, keras, keras_recurrent\n"
        "x = np.ones((2, 5, 16), 'float32')\n"
        "y = keras_recurrent.layers.RecurrentBlock(32)(x)\n"
        "print(json.dumps([list(y.shape), sorted({m.partition('.')[0] for m in sys.modules})]))"
    )
    path = os.pathsep.join([str(one_framework), str(ROOT)])
    shape, loaded = fresh_process("-S", "-c", code, PYTHONPATH=path)
    assert shape == [2, 5, 16]
    assert set(FRAMEWORKS) & set(loaded) == {BACKEND}
