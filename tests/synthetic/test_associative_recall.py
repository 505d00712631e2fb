"""The task of associative recall."""

import numpy as np
import pytest

from guides.synthetic.associative_recall import associative_recall

pytestmark = pytest.mark.once


def test_associative_recall_labels_are_the_values_of_the_keys():
    tokens, labels, weights = associative_recall(200, 5, 24, 32, num_queries=3, seed=4)
    assert tokens.shape == labels.shape == weights.shape == (200, 24)
    assert (tokens.dtype, labels.dtype, weights.dtype) == ("int32", "int32", "float32")
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
        assert not labels[row, weights[row] == 0].any()
    assert set(np.unique(weights)) == {0, 1}


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
