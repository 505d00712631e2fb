"""With a JAX that lacks a part of Pallas, the package imports, and the folder gives the reason."""

import sys

import keras
import pytest

if keras.config.backend() != "jax":
    pytest.skip("runs on JAX", allow_module_level=True)

from keras_recurrent.backends import pallas
from tests.processes import fresh_process

TPU = "jax.experimental.pallas.tpu"
# Keras imports Pallas for TPUs; its names are removed afterwards.
IMPORT_WITHOUT_NAMES = f"""
import json, sys, types
import keras
sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # KerasHub would import them.
for name in ("jax.experimental.pallas", "{TPU}"):
    sys.modules[name] = types.ModuleType(name)
from keras_recurrent import dispatch
print(json.dumps(dispatch.IMPLEMENTATIONS["linear_scan"]["pallas"]))
"""


@pytest.mark.nightly
def test_package_imports_without_the_names_of_pallas():
    """A name that another version of JAX lacks breaks the import of the package."""
    reason = fresh_process("-c", IMPORT_WITHOUT_NAMES)
    assert "lacks a part of Pallas: cannot import name 'BlockSpec'" in reason


def test_pallas_of_the_installed_jax_is_available():
    assert pallas.unavailable() is None


@pytest.mark.parametrize("name", ["pallas_call", "tpu.roll", "tpu.VMEM"])
def test_missing_name_is_the_reason(name, monkeypatch):
    monkeypatch.delattr(f"jax.experimental.pallas.{name}")
    monkeypatch.delitem(sys.modules, f"{pallas.__name__}._pallas")
    name = name.removeprefix("tpu.")
    assert f"lacks a part of Pallas: cannot import name '{name}'" in pallas.unavailable()


def test_missing_module_is_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, TPU, None)
    monkeypatch.delitem(sys.modules, f"{pallas.__name__}._pallas")
    assert TPU in pallas.unavailable()
