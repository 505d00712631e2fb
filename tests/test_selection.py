"""Selection of tests for a change, and its table."""

import fnmatch
import subprocess
import tomllib

import pytest

from tests import selection
from tests.selection import BACKENDS, EVERYTHING, ROOT, select

pytestmark = pytest.mark.once

ROWS = tomllib.loads(selection.TABLE.read_text())
KEYS = {"all", "nightly", "also", "everything", "make", *BACKENDS}
TESTS_OF_DOCS = " ".join(
    f"tests/test_{name}.py" for name in ("docs", "imports", "packaging", "reference", "results")
)
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


def test_select_changed_manual_runs_tests_of_docs_only():
    assert select(["docs/layers.md", "README.md"]) == [
        *("lint", "test-torch", f"TESTS_torch={TESTS_OF_DOCS}", "NIGHTLY_torch=", "docs")
    ]


def test_select_changed_kernel_runs_its_backend_with_nightly_tests():
    selected = select(["backends/tensorflow/rg_lru.py"])
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


def test_select_changed_test_runs_its_nightly_tests():
    selected = select(["tests/papers/test_times.py", "README.md"])
    assert "TESTS_jax=tests/papers/test_times.py" in selected
    assert "NIGHTLY_jax=tests/papers/test_times.py" in selected


def test_outermost_drops_nested_paths():
    paths = {"tests/ops/test_ops.py", "tests/ops", "tests/ops2"}
    assert selection.outermost(paths) == ["tests/ops", "tests/ops2"]


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
