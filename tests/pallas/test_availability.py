"""With a JAX that lacks a part of Pallas, modules import, and the folder gives the reason."""

import ast
import pathlib
import sys

import keras
import pytest

if keras.config.backend() != "jax":
    pytest.skip("runs on JAX", allow_module_level=True)

from keras_recurrent.backends import pallas
from keras_recurrent.backends.pallas import _platform
from tests.processes import fresh_process

FOLDER = pathlib.Path(pallas.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
TPU = "jax.experimental.pallas.tpu"
# Keras imports Pallas for TPUs; its names are removed afterwards.
IMPORT_WITHOUT_NAMES = f"""
import importlib, json, sys, types
import keras
sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # KerasHub would import them.
for name in ("jax.experimental.pallas", "{TPU}"):
    sys.modules[name] = types.ModuleType(name)
from keras_recurrent.backends.pallas import _platform
for name in {MODULES}:
    importlib.import_module(f"keras_recurrent.backends.pallas.{{name}}")
print(json.dumps(_platform.unavailable()))
"""


@pytest.mark.nightly
def test_modules_import_without_the_names_of_pallas():
    """A name that another version of JAX lacks breaks the import of the package."""
    reason = fresh_process("-c", IMPORT_WITHOUT_NAMES)
    assert reason.startswith("needs `jax.experimental.pallas.BlockSpec`, which JAX ")


def test_pallas_of_the_installed_jax_is_available():
    assert _platform.unavailable() is None


@pytest.mark.parametrize("name", ["pallas_call", "tpu.roll", "tpu.VMEM"])
def test_missing_name_is_the_reason(name, monkeypatch):
    monkeypatch.delattr(f"jax.experimental.pallas.{name}")
    reason = _platform.unavailable.__wrapped__()
    assert reason.startswith(f"needs `jax.experimental.pallas.{name}`, which JAX ")


def test_missing_module_is_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, TPU, None)
    assert f"cannot import `{TPU}`: " in _platform.unavailable.__wrapped__()


def test_list_of_names_is_complete():
    """`PALLAS_NAMES` lacks a `pl.name` or `pltpu.name` of the folder, or has another one."""
    prefixes = {"pl": "", "pltpu": "tpu."}
    names = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                modules = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                assert not any("jax.experimental" in (module or "") for module in modules), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                prefix = prefixes.get(node.value.id)
                if prefix is not None:
                    names.add(prefix + node.attr)
    assert names == set(_platform.PALLAS_NAMES)
