"""The guides below guides/papers, for their tests."""

import importlib

import pytest

from tests.papers.running import PAPERS


@pytest.fixture
def guide(monkeypatch):
    """A function that imports a guide by its name."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(PAPERS)

    def load(name):
        return importlib.import_module(name)

    return load
