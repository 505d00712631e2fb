"""Properties of all tasks: seeds, errors and the examples in docstrings."""

import doctest
import importlib

import numpy as np
import pytest

from guides.synthetic.associative_recall import associative_recall
from guides.synthetic.induction_heads import induction_heads
from guides.synthetic.list_ops import list_ops
from guides.synthetic.phone_book import phone_book
from guides.synthetic.selective_copying import selective_copying
from tests.processes import ROOT

pytestmark = pytest.mark.once

MODULES = sorted(path.stem for path in (ROOT / "guides/synthetic").glob("*.py"))
TASKS = {
    associative_recall: {
        "num_examples": 3,
        "num_pairs": 4,
        "sequence_length": 20,
        "vocabulary_size": 10,
    },
    selective_copying: {"num_examples": 3, "num_data": 4, "sequence_length": 20},
    induction_heads: {"num_examples": 3, "sequence_length": 20},
    phone_book: {"num_examples": 3, "num_names": 7},
    list_ops: {"num_examples": 3, "min_length": 7, "max_length": 30, "max_depth": 3, "max_args": 4},
}
ERRORS = {
    associative_recall: [
        ({"num_queries": 0}, "`num_queries` must be an integer, at least 1; got 0"),
        ({"sequence_length": "16"}, "`sequence_length` must be an integer"),
        ({"power": 0.0}, "`power` must be above 0"),
        ({"vocabulary_size": 9}, "`vocabulary_size` must be at least 10, .*; got 9"),
        ({"num_queries": 5}, "`num_queries` must be at most `num_pairs`, 4"),
        ({"sequence_length": 15}, "`sequence_length` must be at least 16, .*; got 15"),
    ],
    selective_copying: [
        ({"sequence_length": 7}, "`sequence_length` must be at least 8, twice"),
        ({"vocabulary_size": 2}, "`vocabulary_size` must be at least 3"),
    ],
    induction_heads: [
        ({"sequence_length": 2}, "`sequence_length` must be at least 3; got 2"),
        ({"vocabulary_size": 1}, "`vocabulary_size` must be at least 2; got 1"),
    ],
    phone_book: [
        ({"num_queries": 8}, "`num_queries` must be at most `num_names`, 7; got 8"),
        ({"vocabulary_size": 13}, "2 tokens in names of 2 make 4 names, and `num_names` is 7"),
        ({"vocabulary_size": 5}, "0 tokens in names of 2 make 0"),
    ],
    list_ops: [
        ({"max_args": 1}, "`max_args` must be at least 2"),
        ({"min_length": 31}, "`min_length` must be at most `max_length`, 30; got 31"),
        ({"max_depth": 2}, "`min_length` must be at most 6, the longest sequence with `max_dep"),
    ],
}
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)


@each_task
def test_task_with_a_seed_is_reproducible(task):
    first, again, other = (task(**TASKS[task], seed=seed) for seed in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first[0] != other[0]).any()


@each_task
def test_task_with_impossible_sizes_raises(task):
    sizes = [name for name in TASKS[task] if name != "vocabulary_size"]
    errors = [
        ({name: value}, f"`{name}` must be an integer, at least 1; got {value!r}")
        for name in sizes
        for value in (0, 2.5)
    ]
    for changes, message in errors + ERRORS[task]:
        with pytest.raises(ValueError, match=message):
            task(**{**TASKS[task], **changes})


@pytest.mark.parametrize("module", MODULES)
def test_example_of_task_returns_documented_result(module):
    result = doctest.testmod(importlib.import_module(f"guides.synthetic.{module}"))
    assert result.attempted
    assert not result.failed
