"""Tasks of copying and recall: selective copying, induction heads, phone book, key-value pairs."""

import collections

import numpy as np
import pytest

from guides.synthetic.associative_recall import associative_recall
from guides.synthetic.induction_heads import induction_heads
from guides.synthetic.phone_book import phone_book
from guides.synthetic.selective_copying import selective_copying

pytestmark = pytest.mark.once


def check_arrays(arrays, shape):
    tokens, labels, weights = arrays
    assert tokens.shape == labels.shape == weights.shape == shape
    assert (tokens.dtype, labels.dtype, weights.dtype) == ("int32", "int32", "float32")
    assert set(np.unique(weights)) == {0, 1}
    assert not labels[weights == 0].any()
    return arrays


def test_selective_copying_labels_are_the_data_in_order():
    arrays = selective_copying(400, num_data=5, sequence_length=24, vocabulary_size=9, seed=3)
    tokens, labels, weights = check_arrays(arrays, (400, 24))
    assert (tokens[:, -5:] == 8).all()
    assert (weights == (np.arange(24) >= 19)).all()
    for row, wanted in zip(tokens[:, :-5], labels[:, -5:], strict=True):
        assert list(row[row > 0]) == list(wanted)
    counts = collections.Counter(tokens[:, :-5].ravel())
    assert set(counts) == set(range(8))
    assert all(230 < counts[token] < 345 for token in range(1, 8))  # 2,000 / 7, 3.5 deviations
    share = (tokens[:, :-5] > 0).mean(axis=0)
    np.testing.assert_allclose(share, 5 / 19, atol=0.09)  # four deviations
    full = selective_copying(2, num_data=4, sequence_length=8, vocabulary_size=3)[0]
    assert full.tolist() == [[1, 1, 1, 1, 2, 2, 2, 2]] * 2


def test_induction_heads_label_follows_the_special_token():
    arrays = induction_heads(3000, sequence_length=12, vocabulary_size=6, seed=1)
    tokens, labels, weights = check_arrays(arrays, (3000, 12))
    assert (weights == (np.arange(12) == 11)).all()
    place = np.argmax(tokens == 5, axis=1)
    assert ((tokens == 5).sum(axis=1) == 2).all()
    assert (tokens[:, -1] == 5).all()
    np.testing.assert_array_equal(labels[:, -1], tokens[np.arange(3000), place + 1])
    np.testing.assert_allclose(np.bincount(place, minlength=12)[:10] / 3000, 0.1, atol=0.025)
    np.testing.assert_allclose(np.bincount(labels[:, -1]) / 3000, 0.2, atol=0.03)
    assert not np.bincount(place, minlength=12)[10:].any()
    assert induction_heads(1, sequence_length=3, vocabulary_size=2)[0].tolist() == [[1, 0, 1]]


@pytest.mark.parametrize("parts", [3, 40])  # all possible names, or few of them
def test_phone_book_labels_are_the_numbers_of_the_names(parts):
    sizes = {"num_names": 9, "num_queries": 4, "name_length": 2, "number_length": 3}
    arrays = phone_book(60, **sizes, vocabulary_size=11 + parts, seed=2)
    lines = [a.reshape(60, 13, 6) for a in check_arrays(arrays, (60, 13 * 6))]
    for tokens, labels, weights in zip(*lines, strict=True):
        assert not tokens[:, 0].any()
        book = {tuple(line[1:3]): list(line[3:]) for line in tokens[:9]}
        assert len(book) == 9
        assert min(min(name) for name in book) >= 11
        assert max(max(name) for name in book) < 11 + parts
        asked = [tuple(line[1:3]) for line in tokens[9:]]
        assert len(set(asked)) == 4
        for name, query, label, weight in zip(
            asked, tokens[9:], labels[9:], weights[9:], strict=True
        ):
            assert list(query[3:]) == book[name]
            assert list(label) == [0, 0, *book[name], 0]
            assert list(weight) == [0, 0, 1, 1, 1, 0]
        assert not weights[:9].any()
    digits = lines[0][:, :9, 3:]
    np.testing.assert_allclose(
        np.bincount(digits.ravel(), minlength=11)[1:] / digits.size, 0.1, atol=0.03
    )
    # Any name of a book may be asked for, the first as often as the last.
    first = [np.where((row[:9, 1:3] == row[9, 1:3]).all(axis=1))[0][0] for row in lines[0]]
    assert len(set(first)) == 9


def test_phone_book_with_long_names_has_distinct_names():
    tokens = phone_book(2, 5, name_length=30, number_length=1)[0].reshape(2, 8, 32)
    assert len({tuple(line[1:31]) for line in tokens[0, :5]}) == 5


def test_associative_recall_labels_are_the_values_of_the_keys():
    arrays = associative_recall(200, 5, 24, 32, num_queries=3, seed=4)
    tokens, labels, weights = check_arrays(arrays, (200, 24))
    for row in range(200):
        keys, values = tokens[row, :10:2], tokens[row, 1:10:2]
        assert len(set(keys)) == len(set(values)) == 5
        assert ((keys >= 1) & (keys < 16)).all()
        assert ((values >= 16) & (values < 32)).all()
        values_of = dict(zip(keys, values, strict=True))
        positions = np.flatnonzero(weights[row])
        assert len(positions) == len(set(tokens[row, positions])) == 3
        assert (positions >= 10).all()
        assert [values_of[key] for key in tokens[row, positions]] == list(labels[row, positions])
        others = np.setdiff1d(np.arange(10, 24), positions)
        assert not tokens[row, others].any()


def test_associative_recall_draws_all_keys_values_and_positions():
    tokens, _, weights = associative_recall(2000, 3, 14, 12, seed=0)
    assert set(np.unique(tokens)) == set(range(12))
    assert weights[:, 6::2].any(axis=0).all()
    keys, values = tokens[:, :6:2], tokens[:, 1:6:2]
    assert len(np.unique(16 * keys + values)) == 5 * 6  # every key with every value


def test_associative_recall_distances_follow_the_power_law():
    means = []
    for power in (0.01, 0.3, 1.0):
        _, _, weights = associative_recall(4000, 2, 64, 16, num_queries=1, power=power)
        distance = np.argmax(weights, axis=1) / 2 - 1  # 1 to 30
        means.append(distance.mean())
        share = np.bincount(distance.astype(int), minlength=31)[1:] / 4000
        expected = np.arange(1, 31) ** (power - 1)
        np.testing.assert_allclose(share, expected / expected.sum(), atol=0.03)
    assert means[0] < means[1] < means[2]
