"""Selection of tests for a change, and its table."""

import fnmatch
import json
import subprocess
import tomllib

import pytest

from tests import selection
from tests.selection import BACKENDS, ROOT, select

pytestmark = pytest.mark.once

ROWS = tomllib.loads(selection.TABLE.read_text())["impact"]
KEYS = {"files", "all", "nightly", "also", "everything", "make", *BACKENDS}
TESTS_OF_DOCS = " ".join(
    f"tests/test_{name}.py" for name in ("docs", "imports", "packaging", "reference", "results")
)
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
).stdout.splitlines()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["files"][0])
def test_table_names_existing_files_and_targets(row):
    """A misspelled key or path would silently select nothing."""
    assert set(row) <= KEYS
    paths = [path for key in ("all", *BACKENDS) for path in row.get(key, ())]
    nightly = row.get("nightly", {})
    assert set(nightly) <= set(BACKENDS)
    for path in [*paths, *(path for paths in nightly.values() for path in paths)]:
        assert (ROOT / path).exists(), path
    for target in row.get("make", ()):
        assert set(selection.target_names(target)) <= set(selection.TARGETS)
    if TRACKED:  # not in a folder without Git
        for pattern in row["files"]:
            assert fnmatch.filter(TRACKED, pattern), pattern


def test_docs_change_runs_only_doc_tests():
    assert select(["docs/layers.md", "README.md"]).make_arguments() == [
        *("lint", "test-torch", f"TESTS_torch={TESTS_OF_DOCS}", "NIGHTLY_torch=", "docs")
    ]


def test_kernel_change_runs_ops_on_its_backend_only():
    selected = select(["backends/tensorflow/rg_lru.py"])
    assert selected.selects("tensorflow", "tests/ops/test_kernels.py", nightly=True)
    assert not selected.selects("torch", "tests/ops/test_kernels.py", nightly=False)
    assert not selected.tests["jax"]


@pytest.mark.parametrize(
    "files", [None, [], ["new/file.py"], ["tests/conftest.py"], ["Makefile"], ["tests/test a.py"]]
)
def test_unknown_files_run_the_full_suite(files):
    arguments = select(files).make_arguments()
    assert [a for a in arguments if a.startswith("TESTS_")] == [
        f"TESTS_{backend}=tests" for backend in BACKENDS
    ]
    assert set(selection.TARGETS) < set(arguments)


def test_changed_test_runs_with_its_nightly_cases():
    selected = select(["tests/papers/test_times.py", "README.md"])
    assert selected.selects("jax", "tests/papers/test_times.py", nightly=True)
    assert "TESTS_jax=tests/papers/test_times.py" in selected.make_arguments()
    # A deleted file may have been imported anywhere.
    everything = select(["tests/papers/test_deleted.py"])
    assert "TESTS_jax=tests" in everything.make_arguments()


def test_outermost_drops_nested_paths():
    assert selection.outermost({"tests/ops/test_ops.py", "tests/ops", "tests/ops2"}) == [
        *("tests/ops", "tests/ops2")
    ]


def test_unselected_failures_are_reported(tmp_path, monkeypatch):
    failed = {"tests/gqa/test_saved.py::test_a": True, "tests/test_docs.py::test_links": False}
    (tmp_path / ".pytest_cache").mkdir()
    (tmp_path / ".pytest_cache" / "failed_torch.json").write_text(json.dumps(failed))
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    assert selection.unselected_failures(["README.md"]) == [
        "torch: tests/gqa/test_saved.py::test_a"
    ]
    assert selection.unselected_failures(["keras_recurrent/gqa/convert.py"]) == []


def test_changed_files_since_a_commit(tmp_path, monkeypatch):
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
