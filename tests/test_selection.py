"""Selection of tests for a change, and the tables that name test files."""

import fnmatch
import json
import subprocess
import tomllib

import pytest

from tests import selection
from tests.budget import ALL, DURATIONS
from tests.selection import BACKENDS, EVERYTHING, ROOT, select

pytestmark = pytest.mark.once

ROWS = tomllib.loads(selection.TABLE.read_text())
KEYS = {"all", "nightly", "also", "everything", "make", *BACKENDS}
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
).stdout.splitlines()


@pytest.mark.parametrize("files", ROWS)
def test_row_of_table_names_existing_files_and_targets(files):
    """A misspelled key or path silently selects nothing."""
    row = ROWS[files]
    nightly = row.get("nightly", {})
    assert set(row) <= KEYS
    assert set(nightly) <= set(BACKENDS)
    lists = *(row.get(key, ()) for key in ("all", *BACKENDS)), *nightly.values()
    assert [path for paths in lists for path in paths if not (ROOT / path).exists()] == []
    assert set(row.get("make", ())) <= set(EVERYTHING["make"])
    if TRACKED:  # not in a folder without Git
        assert [name for name in files.split() if not fnmatch.filter(TRACKED, name)] == []


def test_durations_name_existing_files():
    durations = json.loads(DURATIONS.read_text())
    assert set(durations.pop("probe")) == set(durations.pop(ALL)) == set(BACKENDS)
    assert [file for file in durations if not (ROOT / file).exists()] == []


def test_select_changed_kernel_runs_its_backend_with_nightly_tests():
    selected = select(["backends/tensorflow/rms_norm.py"])
    assert "NIGHTLY_tensorflow=tests/devices/test_tensorflow_mirrored.py,tests/ops" in selected
    assert "test-export-tensorflow" in selected
    assert not [
        argument for argument in selected if "tests/ops" in argument and "torch" in argument
    ]


@pytest.mark.parametrize(
    "files",
    [
        *(None, [], ["new/file.py"], ["tests/conftest.py"], ["Makefile"], ["tests/test a.py"]),
        ["tests/papers/test_deleted.py"],  # it may have been imported anywhere
    ],
)
def test_select_unknown_files_runs_all_tests_that_are_not_nightly(files):
    selected = select(files)
    for backend in BACKENDS:
        assert {f"TESTS_{backend}=tests", f"NIGHTLY_{backend}="} < set(selected)
    assert {"lint", "docs", *EVERYTHING["make"]} < set(selected)


def test_changed_files_lists_committed_and_untracked_files(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("committed", "changed"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    assert selection.changed_files(None) is None  # there is no origin/main
    assert selection.changed_files("HEAD") == []
    (tmp_path / "changed").write_text("2")
    (tmp_path / "new é").write_text("1")
    assert selection.changed_files("HEAD") == ["changed", "new é"]
