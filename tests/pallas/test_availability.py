"""Where JAX lacks a part of Pallas, the modules import all the same and the folder says why."""

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
# Keras itself imports Pallas for TPU: its names are taken away after that.
IMPORT_WITHOUT_NAMES = f"""
import importlib, json, sys, types
import keras
sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # which KerasHub would import
for name in ("jax.experimental.pallas", "{TPU}"):
    sys.modules[name] = types.ModuleType(name)
from keras_recurrent.backends.pallas import _platform
for name in {MODULES}:
    importlib.import_module(f"keras_recurrent.backends.pallas.{{name}}")
print(json.dumps(_platform.unavailable()))
"""


def test_no_name_of_pallas_is_read_at_import():
    reason = fresh_process("-c", IMPORT_WITHOUT_NAMES)
    assert reason.startswith("needs `jax.experimental.pallas.BlockSpec`, which JAX ")


def test_nothing_is_missing():
    assert _platform.unavailable() is None


@pytest.mark.parametrize("name", ["pallas_call", "tpu.roll", "tpu.VMEM"])
def test_a_missing_name_is_a_reason(name, monkeypatch):
    monkeypatch.delattr(f"jax.experimental.pallas.{name}")
    reason = _platform.unavailable.__wrapped__()
    assert reason.startswith(f"needs `jax.experimental.pallas.{name}`, which JAX ")


def test_a_missing_module_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, TPU, None)
    assert f"cannot import `{TPU}`: " in _platform.unavailable.__wrapped__()


def test_the_list_of_names_is_complete():
    """Each `pl.name` and `pltpu.name` of the folder is in it, and nothing else is."""
    prefixes = {"pl": "", "pltpu": "tpu."}
    read = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                modules = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                assert not any("jax.experimental" in (module or "") for module in modules), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                prefix = prefixes.get(node.value.id)
                if prefix is not None:
                    read.add(prefix + node.attr)
    assert read == set(_platform.PALLAS_NAMES)
