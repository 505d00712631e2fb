"""The examples in the docstrings of the tasks."""

import doctest
import importlib

import pytest

from tests.processes import ROOT

TASKS = sorted(path.stem for path in (ROOT / "guides/synthetic").glob("*.py"))


@pytest.mark.once
@pytest.mark.parametrize("task", TASKS)
def test_example_of_task_returns_documented_result(task):
    result = doctest.testmod(importlib.import_module(f"guides.synthetic.{task}"))
    assert result.attempted
    assert not result.failed
