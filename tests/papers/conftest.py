"""The guides below guides/papers, for their tests."""

import importlib

import pytest

from tests.papers.running import PAPERS


@pytest.fixture
def guide(monkeypatch):
    """A function that imports a guide by its name."""
    pytest.importorskip("matplotlib")
    for folder in (PAPERS.parent, PAPERS):  # `runs` adds the first one, once in a process
        monkeypatch.syspath_prepend(folder)

    def load(name):
        return importlib.import_module(name)

    return load
