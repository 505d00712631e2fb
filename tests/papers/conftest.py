"""The guides below guides/papers, imported by name, and run as from a shell, at toy size."""

import importlib
import json
import shlex

import pytest

from tests.processes import ROOT

PAPERS = ROOT / "guides/papers"


@pytest.fixture
def guide(monkeypatch):
    """A function that imports a guide by its name."""
    pytest.importorskip("matplotlib")
    for folder in (PAPERS.parent, PAPERS):  # `runs` adds the first one, once in a process
        monkeypatch.syspath_prepend(folder)
    return importlib.import_module


@pytest.fixture
def call(guide, capsys, tmp_path):
    """A function that runs a guide with arguments, and returns what it prints."""

    def call(name, arguments=""):
        arguments = ["--output", str(tmp_path), *shlex.split(arguments)]
        guide("run").main(name, arguments)
        return capsys.readouterr().out

    return call


@pytest.fixture
def run_twice(call, guide, tmp_path):
    """A function that runs a guide, deletes its last result, and runs it again.

    It returns the lines of results, and the output of the second run.
    """

    def run(name, arguments):
        call(name, f"{arguments} --seeds 0")
        path = tmp_path / f"{name}.jsonl"
        *kept, lost = path.read_text().splitlines()
        path.write_text("\n".join([*kept, ""]))
        printed = call(name, f"{arguments} --seeds 0")
        assert path.read_text().splitlines()[:-1] == kept
        assert (tmp_path / f"{name}.png").stat().st_size > 0
        lines = guide("runs").Results(path).lines
        assert lines[-1].keys() == json.loads(lost).keys()
        return lines, printed

    return run
