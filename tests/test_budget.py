"""The budget of CPU seconds for each test file."""

import json

import pytest

from tests.budget import DURATIONS, over_budget
from tests.selection import BACKENDS, ROOT

pytestmark = pytest.mark.once


def test_limit_is_twice_the_entry_plus_10_seconds():
    entries = {"tests/a.py": 10.0}
    assert over_budget({"tests/a.py": 29.9, "tests/new.py": 9.9}, entries, scale=1) == []
    (line,) = over_budget({"tests/a.py": 30.1}, entries, scale=1)
    assert line.startswith("tests/a.py: 30.1 CPU s (scaled by 1.00), limit 30.0: make")
    (line,) = over_budget({"tests/new.py": 10.1}, entries, scale=1)
    assert line.startswith("tests/new.py: 10.1 CPU s (scaled by 1.00), limit 10.0")


def test_limit_of_all_files_is_1_3_times_their_entries():
    entries = {"tests/a.py": 50.0, "tests/b.py": 50.0}
    assert over_budget(dict.fromkeys(entries, 64.9), entries, scale=1, complete=True) == []
    (line,) = over_budget(dict.fromkeys(entries, 65.1), entries, scale=1, complete=True)
    assert line.startswith("all files: 130 CPU s (scaled by 1.00), limit 130: make")


def test_limit_scales_with_machine_speed():
    assert over_budget({"tests/a.py": 40.0}, {"tests/a.py": 10.0}, scale=0.5) == []
    assert over_budget({"tests/a.py": 40.0}, {"tests/a.py": 10.0}, scale=1) != []


def test_entries_name_existing_files():
    durations = json.loads(DURATIONS.read_text())
    assert set(durations) == set(BACKENDS)
    for row in durations.values():
        assert row["probe"] > 0
        assert [file for file in row["files"] if not (ROOT / file).exists()] == []
