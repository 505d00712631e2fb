"""The task of ListOps: lists of digits and their values."""

import numpy as np
import pytest

from guides.synthetic.list_ops import list_ops

pytestmark = pytest.mark.once

NAMES = ["", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"]
FUNCTIONS = {
    "[MIN": np.min,
    "[MAX": np.max,
    "[MED": np.median,  # rounded down, as in Long Range Arena
    "[SM": lambda values: np.sum(values) % 10,
}


def parse(tokens):
    """Returns the value of a list of tokens, its depth, and the numbers of arguments."""
    names = [NAMES[token] for token in tokens]
    stack, deepest, counts = [["row"]], 1, []
    for name in names:
        if name in FUNCTIONS:
            stack.append([name])
            deepest = max(deepest, len(stack))
        elif name == "]":
            operator, *values = stack.pop()
            counts.append(len(values))
            stack[-1].append(int(FUNCTIONS[operator](values)))
        else:
            stack[-1].append(int(name))
    ((_, value),) = stack
    return value, deepest, counts


def test_list_ops_labels_are_the_values_of_the_lists():
    lengths, deepest, counts = set(), set(), set()
    tokens, labels = list_ops(400, min_length=10, max_length=60, max_depth=4, max_args=5)
    assert tokens.shape == (400, 60)
    assert tokens.dtype == labels.dtype == "int32"
    for row, label in zip(tokens, labels, strict=True):
        length = np.count_nonzero(row)
        assert (row[:length] > 0).all()
        value, depth, arguments = parse(row[:length])
        assert value == label
        lengths.add(length)
        deepest.add(depth)
        counts |= set(arguments)
    assert min(lengths) == 10
    assert max(lengths) in range(50, 61)
    assert deepest == {3, 4}  # a list of five digits has seven tokens
    assert counts == {2, 3, 4, 5}
    assert set(labels) == set(range(10))


def test_list_ops_default_sizes_are_those_of_long_range_arena():
    tokens, _ = list_ops(100)
    lengths = np.count_nonzero(tokens, axis=1)
    assert tokens.shape == (100, 2000)
    assert 500 <= lengths.min() < 700
    assert 1700 < lengths.max() <= 2000
    parsed = [parse(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
    assert max(depth for _, depth, _ in parsed) == 10
    assert {n for _, _, counts in parsed for n in counts} == set(range(2, 11))


def test_list_ops_draws_lists_and_digits_as_long_range_arena():
    """Without limits of length: a quarter are lists, operators and sizes are alike."""
    tokens, labels = list_ops(20_000, min_length=1, max_length=42, max_depth=3, max_args=4)
    assert np.count_nonzero(tokens, axis=1).max() <= 2 + 4 * 6  # never cut off
    first = tokens[:, 0]
    np.testing.assert_allclose(np.mean(first > 10), 0.25, atol=0.015)
    share = np.bincount(first, minlength=15)[1:] / len(first)
    np.testing.assert_allclose(share[:10], 0.075, atol=0.01)
    np.testing.assert_allclose(share[10:], 0.0625, atol=0.01)
    counts = [parse(row[row > 0])[2][-1] for row in tokens[first > 10]]
    np.testing.assert_allclose(np.bincount(counts)[2:] / len(counts), 1 / 3, atol=0.03)
    np.testing.assert_array_equal(labels[first <= 10], first[first <= 10] - 1)


def test_list_ops_with_improbable_lengths_raises(monkeypatch):
    monkeypatch.setitem(list_ops.__globals__, "MAX_DRAWS", 1000)
    with pytest.raises(ValueError, match="no sequence of 122 to 122 tokens in 1,000 draws"):
        list_ops(1, min_length=122, max_length=122, max_depth=3)
