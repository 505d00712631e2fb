"""The budget of CPU seconds for each test file."""

import json

import pytest

from tests.budget import ALL, DURATIONS, over_budget
from tests.selection import BACKENDS, ROOT

ENTRIES = {ALL: 100.0, "tests/a.py": 10.0}


@pytest.mark.once
@pytest.mark.parametrize(
    ("file", "limit"), [("tests/a.py", 30), ("tests/without_entry.py", 20), (ALL, 130)]
)
def test_over_budget_names_files_above_their_limit(file, limit):
    assert over_budget({file: limit - 0.1}, ENTRIES) == []
    (message,) = over_budget({file: limit + 0.1}, ENTRIES)
    assert message.startswith(f"{file}: {limit}.1 CPU s, limit {limit}.0: make tests cheaper")


@pytest.mark.once
def test_durations_name_existing_files():
    durations = json.loads(DURATIONS.read_text())
    assert set(durations.pop("probe")) == set(durations.pop(ALL)) == set(BACKENDS)
    assert [file for file in durations if not (ROOT / file).exists()] == []
