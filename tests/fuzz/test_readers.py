"""Random damage to checkpoints, and faults that must be detected.

    python -m pytest tests/fuzz/test_readers.py --nightly=tests/fuzz --draws 10000

A draw takes a millisecond if the environment variable TMPDIR names a directory in memory. `--start`
continues after another run; with `--draws 1` it repeats a draw.
"""

import time

import pytest

pytest.importorskip("resource")  # which limits memory, and exists on Unix alone

from keras_recurrent.checkpoints import config_reader, tensor_table
from tests.fuzz import readers

pytestmark = [pytest.mark.nightly, pytest.mark.once]


@pytest.fixture
def numbers(request):
    """The numbers of draws that the options of pytest ask for; by default, the first 60."""
    draws, start = request.config.getoption("draws"), request.config.getoption("start")
    draws = {"few": 60, "many": 100_000}.get(draws, draws)
    return range(start, start + int(draws))


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_checkpoint_is_read_or_raises_an_error_with_its_file(seed, numbers):
    """A damaged header or configuration crashes, takes memory, or the error names no file."""
    counts, faults = readers.run(numbers, seed)
    assert not faults
    if len(numbers) >= 60:
        assert counts["right"] > 5
        assert counts["error"] > 30


def test_damaged_checkpoint_is_loaded_right_or_raises_an_error_with_its_file(numbers):
    """A damaged checkpoint becomes a model with other weights."""
    numbers = numbers[: max(8, len(numbers) // 100)]  # A model takes as long as 100 headers.
    counts, faults = readers.run(numbers, 3, "load")
    assert not faults
    assert len(numbers) < 8 or set(counts) == {"right", "error"}


def test_error_of_another_type_is_a_fault(monkeypatch):
    def unchecked(self, key, default=1, multiple_of=1, maximum=None):
        return self._value(key, default) // multiple_of * multiple_of

    monkeypatch.setattr(config_reader.ConfigReader, "integer", unchecked)
    _, faults = readers.run(range(60), 1)
    assert any("TypeError: unsupported operand" in fault for fault in faults)


def test_slow_draw_is_a_fault(monkeypatch):
    def slow(*arguments):
        time.sleep(0.01)
        return check(*arguments)

    check = tensor_table.check
    monkeypatch.setattr(tensor_table, "check", slow)
    monkeypatch.setattr(readers, "MAX_SECONDS", {"read": 0.005})
    _, faults = readers.run(range(10), 1)
    assert any(" s: right" in fault for fault in faults)


def test_wrong_weight_is_a_fault(monkeypatch):
    def wrong(backbone, *arguments):
        assign(backbone, *arguments)
        weight = backbone.transformer_layers[1].weights[0]
        weight.assign(weight + 1e-6)

    assign = tensor_table.assign
    monkeypatch.setattr(tensor_table, "assign", wrong)
    with pytest.raises(AssertionError, match="differs from the file"):
        readers.run(range(1), 1, "load")
