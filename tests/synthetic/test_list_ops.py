"""The examples of ListOps are well-formed, and come to what they say."""

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
    """The value of a row by reading it from the left, its depth, and the numbers of arguments."""
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


def test_rows_are_what_was_asked_for():
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


def test_the_defaults_are_those_of_long_range_arena():
    tokens, _ = list_ops(100)
    lengths = np.count_nonzero(tokens, axis=1)
    assert tokens.shape == (100, 2000)
    assert 500 <= lengths.min() < 700
    assert 1700 < lengths.max() <= 2000
    parsed = [parse(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
    assert max(depth for _, depth, _ in parsed) == 10
    assert {n for _, _, counts in parsed for n in counts} == set(range(2, 11))


def test_lists_and_digits_are_drawn_as_in_long_range_arena():
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


def test_a_seed_makes_the_same_examples():
    first, again, other = (
        list_ops(20, min_length=20, max_length=50, seed=seed) for seed in (1, 1, 2)
    )
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first[0] != other[0]).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: value}, f"`{name}` must be an integer, at least 1; got {value!r}")
            for name in ("num_examples", "min_length", "max_length", "max_depth", "max_args")
            for value in (0, 2.5)
        ),
        ({"max_args": 1}, "`max_args` must be at least 2"),
        ({"min_length": 31}, "`min_length` must be at most `max_length`, 30; got 31"),
        (
            {"max_depth": 2},
            "`min_length` must be at most 6, the longest sequence with `max_depth=2`",
        ),
    ],
)
def test_what_does_not_fit_is_said(changes, message):
    sizes = {"num_examples": 2, "min_length": 7, "max_length": 30, "max_depth": 3, "max_args": 4}
    assert list_ops(**sizes)[0].shape == (2, 30)
    with pytest.raises(ValueError, match=message):
        list_ops(**{**sizes, **changes})


def test_lengths_that_hardly_any_row_has_are_an_error(monkeypatch):
    monkeypatch.setitem(list_ops.__globals__, "MAX_DRAWS", 1000)
    with pytest.raises(ValueError, match="no sequence of 122 to 122 tokens in 1,000 draws"):
        list_ops(1, min_length=122, max_length=122, max_depth=3)
