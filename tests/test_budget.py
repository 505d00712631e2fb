"""The budget of CPU seconds for each test file."""

import json

import pytest

from tests.budget import LEDGER, excesses
from tests.selection import BACKENDS, ROOT

pytestmark = pytest.mark.once


def test_files_may_take_half_again_and_three_seconds():
    entries = {"tests/a.py": 10.0}
    assert excesses({"tests/a.py": 17.9, "tests/new.py": 2.9}, entries, scale=1) == []
    (line,) = excesses({"tests/a.py": 18.1}, entries, scale=1)
    assert line.startswith("tests/a.py: 18.1 CPU s, at most 18.0 are allowed")
    (line,) = excesses({"tests/new.py": 3.1}, entries, scale=1)
    assert line.startswith("tests/new.py: 3.1 CPU s, at most 3.0")


def test_a_busy_machine_is_allowed_more():
    assert excesses({"tests/a.py": 30.0}, {"tests/a.py": 10.0}, scale=0.5) == []
    assert excesses({"tests/a.py": 30.0}, {"tests/a.py": 10.0}, scale=1) != []


def test_entries_are_of_files_that_exist():
    ledger = json.loads(LEDGER.read_text())
    assert set(ledger) == set(BACKENDS)
    for row in ledger.values():
        assert row["collection"] > 0
        assert [file for file in row["files"] if not (ROOT / file).exists()] == []
