"""A few of the draws of `readers.py`, the same ones each time, and what it must not overlook."""

import time

import pytest

pytest.importorskip("resource")  # which bounds memory, and is not on every system

from keras_recurrent.checkpoints import config_reader, tensor_table
from tests.fuzz import readers

pytestmark = [pytest.mark.nightly, pytest.mark.once]


@pytest.mark.parametrize("seed", [1, 2])
def test_headers_and_configurations(seed):
    told = []
    counts = readers.run(60, seed, report=told.append)
    assert not told
    assert counts["right"] > 5
    assert counts["error"] > 30


def test_models():
    told = []
    counts = readers.run(8, 3, through=True, report=told.append)
    assert not told
    assert set(counts) == {"right", "error"}


def test_a_fault_of_another_type_is_told(monkeypatch):
    def unchecked(self, key, default=1, multiple_of=1, maximum=None):
        return self._value(key, default) // multiple_of * multiple_of

    monkeypatch.setattr(config_reader.ConfigReader, "integer", unchecked)
    told = []
    counts = readers.run(60, 1, report=told.append)
    assert counts["wrong"] == len(told) > 0
    assert any("TypeError: unsupported operand" in line for line in told)


def test_a_slow_draw_is_told(monkeypatch):
    def slow(*arguments):
        time.sleep(0.01)
        return check(*arguments)

    check = tensor_table.check
    monkeypatch.setattr(tensor_table, "check", slow)
    monkeypatch.setattr(readers, "MOST_SECONDS", {False: 0.005})
    told = []
    readers.run(10, 1, report=told.append)
    assert any(" s: right" in line for line in told)


def test_a_wrong_weight_is_told(monkeypatch):
    def wrong(backbone, *arguments):
        assign(backbone, *arguments)
        weight = backbone.transformer_layers[1].weights[0]
        weight.assign(weight + 1e-6)

    assign = tensor_table.assign
    monkeypatch.setattr(tensor_table, "assign", wrong)
    with pytest.raises(AssertionError, match="is not what the file holds"):
        readers.run(1, 1, through=True)
