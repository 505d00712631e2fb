"""The budget of CPU seconds for each test file."""

import json

import pytest

from tests.budget import DURATIONS, over_budget
from tests.selection import BACKENDS, ROOT

pytestmark = pytest.mark.once


def test_limit_is_1_5_times_entry_plus_3_seconds():
    entries = {"tests/a.py": 10.0}
    assert over_budget({"tests/a.py": 17.9, "tests/new.py": 2.9}, entries, scale=1) == []
    (line,) = over_budget({"tests/a.py": 18.1}, entries, scale=1)
    assert line.startswith("tests/a.py: 18.1 CPU s (scaled by 1.00), limit 18.0: make")
    (line,) = over_budget({"tests/new.py": 3.1}, entries, scale=1)
    assert line.startswith("tests/new.py: 3.1 CPU s (scaled by 1.00), limit 3.0")


def test_limit_scales_with_machine_speed():
    assert over_budget({"tests/a.py": 30.0}, {"tests/a.py": 10.0}, scale=0.5) == []
    assert over_budget({"tests/a.py": 30.0}, {"tests/a.py": 10.0}, scale=1) != []


def test_entries_name_existing_files():
    durations = json.loads(DURATIONS.read_text())
    assert set(durations) == set(BACKENDS)
    for row in durations.values():
        assert row["probe"] > 0
        assert [file for file in row["files"] if not (ROOT / file).exists()] == []
