"""The task of associative recall."""

import numpy as np
import pytest

from guides.synthetic.associative_recall import associative_recall

pytestmark = pytest.mark.once


def test_queries_ask_for_what_was_said():
    tokens, labels, weights = associative_recall(200, 5, 24, 32, num_queries=3, seed=4)
    assert tokens.shape == labels.shape == weights.shape == (200, 24)
    assert (tokens.dtype, labels.dtype, weights.dtype) == ("int32", "int32", "float32")
    for row in range(200):
        keys, values = tokens[row, :10:2], tokens[row, 1:10:2]
        assert len(set(keys)) == len(set(values)) == 5
        assert ((keys >= 1) & (keys < 16)).all()
        assert ((values >= 16) & (values < 32)).all()
        said = dict(zip(keys, values, strict=True))
        places = np.flatnonzero(weights[row])
        assert len(places) == len(set(tokens[row, places])) == 3
        assert (places >= 10).all()
        assert [said[key] for key in tokens[row, places]] == list(labels[row, places])
        silent = np.setdiff1d(np.arange(10, 24), places)
        assert not tokens[row, silent].any()
        assert not labels[row, weights[row] == 0].any()
    assert set(np.unique(weights)) == {0, 1}


def test_all_tokens_and_places_come_up():
    tokens, _, weights = associative_recall(2000, 3, 14, 12, seed=0)
    assert set(np.unique(tokens)) == set(range(12))
    assert weights[:, 6::2].any(axis=0).all()
    keys, values = tokens[:, :6:2], tokens[:, 1:6:2]
    assert len(np.unique(16 * keys + values)) == 5 * 6  # every key with every value


def test_queries_stand_near_the_pairs_the_smaller_the_power():
    means = []
    for power in (0.01, 0.3, 1.0):
        _, _, weights = associative_recall(4000, 2, 64, 16, num_queries=1, power=power)
        distance = np.argmax(weights, axis=1) / 2 - 1  # 1 to 30
        means.append(distance.mean())
        share = np.bincount(distance.astype(int), minlength=31)[1:] / 4000
        wanted = np.arange(1, 31) ** (power - 1)
        np.testing.assert_allclose(share, wanted / wanted.sum(), atol=0.03)
    assert means[0] < means[1] < means[2]


def test_a_seed_makes_the_same_examples():
    first, again, other = (associative_recall(20, 4, 20, 16, seed=s) for s in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first[0] != other[0]).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 0}, "`num_examples` must be an integer, at least 1; got 0"),
        ({"num_pairs": 0}, "`num_pairs` must be an integer, at least 1; got 0"),
        ({"num_queries": 0}, "`num_queries` must be an integer, at least 1; got 0"),
        ({"num_examples": 2.5}, "`num_examples` must be an integer, at least 1; got 2.5"),
        ({"sequence_length": "16"}, "`sequence_length` must be an integer"),
        ({"power": 0.0}, "`power` must be above 0"),
        ({"vocabulary_size": 9}, "`vocabulary_size` must be at least 10, .*; got 9"),
        ({"num_queries": 5}, "`num_queries` must be at most `num_pairs`, 4"),
        ({"sequence_length": 15}, "`sequence_length` must be at least 16, .*; got 15"),
    ],
)
def test_what_does_not_fit_is_said(changes, message):
    sizes = {"num_examples": 2, "num_pairs": 4, "sequence_length": 16, "vocabulary_size": 10}
    assert associative_recall(**sizes)[0].shape == (2, 16)
    with pytest.raises(ValueError, match=message):
        associative_recall(**{**sizes, **changes})
