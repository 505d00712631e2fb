"""Triton's interpreter computes for the tests what it computes for others."""

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

from tests.ops import judge
from tests.ops.cases import Case, draw

if not judge.INTERPRETED:
    pytest.skip("compiles for a GPU", allow_module_level=True)

from tests import interpreter

if not interpreter.ORIGINALS:
    pytest.skip("runs as it came", allow_module_level=True)


@pytest.mark.parametrize("operation", ["linear_scan", "lightning_attention"])
def test_patched_interpreter_matches_the_original(operation, monkeypatch):
    drawn = draw(operation, Case(2, 20, 5, "bfloat16", kinds=True, state=True))
    found = judge.run(operation, "triton", drawn)
    for holder, name, original in interpreter.ORIGINALS:
        monkeypatch.setattr(holder, name, original)
    for name, expected in judge.run(operation, "triton", drawn).items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
