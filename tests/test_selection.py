"""The tests that CI selects for a change, and the table that says so."""

import fnmatch
import json
import subprocess
import tomllib

import pytest

from tests import selection
from tests.selection import BACKENDS, ROOT, select

pytestmark = pytest.mark.once

ROWS = tomllib.loads(selection.TABLE.read_text())["impact"]
KEYS = {"files", "all", "nightly", "make", "everything", *BACKENDS}
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
).stdout.splitlines()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["files"][0])
def test_rows_name_what_exists(row):
    """A misspelt key or path would select nothing, without a word."""
    assert set(row) <= KEYS
    paths = [path for key in ("all", *BACKENDS) for path in row.get(key, ())]
    nightly = row.get("nightly", {})
    assert set(nightly) <= set(BACKENDS)
    for path in [*paths, *(path for paths in nightly.values() for path in paths)]:
        assert (ROOT / path).exists(), path
    for goal in row.get("make", ()):
        assert set(selection.goal_names(goal)) <= set(selection.GOALS)
    if TRACKED:  # not in a folder without Git
        for pattern in row["files"]:
            assert fnmatch.filter(TRACKED, pattern), pattern


def test_a_page_runs_its_examples_alone():
    assert select(["docs/layers.md", "README.md"]).words() == [
        *("lint", "test-torch", "TESTS_torch=tests/test_docs.py", "NIGHTLY_torch=", "docs")
    ]


def test_a_kernel_runs_its_operation_on_its_backend():
    selected = select(["backends/tensorflow/rg_lru.py"])
    assert selected.has("tensorflow", "tests/ops/test_kernels.py", nightly=True)
    assert not selected.tests["torch"]
    assert not selected.tests["jax"]


@pytest.mark.parametrize("files", [None, [], ["new/file.py"], ["tests/conftest.py"], ["Makefile"]])
def test_unknown_files_run_everything(files):
    words = select(files).words()
    assert [word for word in words if word.startswith("TESTS_")] == [
        f"TESTS_{backend}=tests" for backend in BACKENDS
    ]
    assert set(selection.GOALS) < set(words)


def test_a_changed_test_runs_with_its_nightly_cases():
    selected = select(["tests/papers/test_times.py", "README.md"])
    assert selected.has("jax", "tests/papers/test_times.py", nightly=True)
    assert "TESTS_jax=tests/papers/test_times.py" in selected.words()
    everything = select(["tests/papers/deleted_test_.py"])  # helpers may be imported anywhere
    assert "TESTS_jax=tests" in everything.words()


def test_folders_cover_the_paths_inside():
    assert selection.outermost({"tests/ops/test_ops.py", "tests/ops", "tests/ops2"}) == [
        *("tests/ops", "tests/ops2")
    ]


def test_failures_that_no_row_selects_are_found(tmp_path, monkeypatch):
    failed = {"tests/gqa/test_saved.py::test_a": True, "tests/test_docs.py::test_links": False}
    (tmp_path / ".pytest_cache").mkdir()
    (tmp_path / ".pytest_cache" / "failed_torch.json").write_text(json.dumps(failed))
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    assert selection.lost(["README.md"]) == ["torch: tests/gqa/test_saved.py::test_a"]
    assert selection.lost(["keras_recurrent/gqa/convert.py"]) == []


def test_changes_are_those_since_a_commit(tmp_path, monkeypatch):
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
    (tmp_path / "new").write_text("1")
    assert selection.changed_files("HEAD") == ["changed", "new"]
