"""`loss_by_position`, compared with `score`, with padding and in chunks."""

import keras
import numpy as np
import pytest

from keras_recurrent.evaluation import loss_by_position, position_loss
from tests.models.tiny import VOCABULARY, tiny_causal_lm

pytestmark = pytest.mark.once


def texts(rows=5, length=9):
    return np.random.default_rng(0).integers(0, VOCABULARY, (rows, length))


@pytest.mark.parametrize("family", ["griffin", "hgrn2"])  # with and without attention
def test_loss_by_position_is_the_mean_of_the_losses_of_score(family, monkeypatch):
    model, token_ids = tiny_causal_lm(family=family), texts()
    expected = model.score(token_ids[:, :-1], scoring_mode="loss", target_ids=token_ids[:, 1:])
    expected = keras.ops.convert_to_numpy(expected).astype("float64")
    for tokens_per_call in (position_loss.TOKENS_PER_CALL, 6):  # in one chunk and in several
        monkeypatch.setattr(position_loss, "TOKENS_PER_CALL", tokens_per_call)
        found = loss_by_position(model, token_ids, batch_size=2)
        np.testing.assert_allclose(found.loss, expected.mean(0), rtol=1e-5)
        np.testing.assert_array_equal(found.num_texts, np.full(8, 5))
    running = [expected[:, : t + 1].mean() for t in range(8)]
    np.testing.assert_allclose(found.running_mean, running, rtol=1e-5)


@pytest.mark.parametrize("padding", ["right", "left and inside"])
def test_loss_by_position_counts_real_tokens_that_follow_real_tokens(padding):
    """Padding counts, or the first token after it, before a text or inside it."""
    model, token_ids = tiny_causal_lm(family="hgrn2"), texts(rows=3)
    mask = np.arange(9) < np.array([[4], [7], [2]])
    if padding == "left and inside":
        mask = np.ones((3, 9), bool)
        mask[0, :4] = mask[1, :1] = mask[1, 3:5] = False
    found = loss_by_position(model, np.where(mask, token_ids, -1), mask)
    total, count = np.zeros(8), np.zeros(8, int)
    for row, real in zip(token_ids, mask, strict=True):
        loss, position = loss_by_position(model, row[None, real]).loss, np.flatnonzero(real)
        follows = np.diff(position) == 1
        total[position[1:][follows] - 1] += loss[follows]
        count[position[1:][follows] - 1] += 1
    np.testing.assert_array_equal(found.num_texts, count)
    with np.errstate(invalid="ignore"):  # no text has a last position
        np.testing.assert_allclose(found.loss, total / count, rtol=1e-5)
    np.testing.assert_allclose(found.running_mean[-1], total.sum() / count.sum(), rtol=1e-5)


def test_loss_by_position_wrong_arguments_raise():
    model, token_ids = tiny_causal_lm(family="hgrn2"), texts()
    with pytest.raises(TypeError, match=r"`model` must be a language model .*; got Dense"):
        loss_by_position(keras.layers.Dense(1), token_ids)
    for given, match in [
        ((token_ids[0],), r"`token_ids` must be integers .*; got int64 of shape \(9,\)"),
        ((token_ids[:, :1],), "with at least two tokens"),
        ((token_ids * 1.0,), "must be integers"),
        ((token_ids + VOCABULARY,), "`token_ids` must be ids from 0 to 60"),
        ((token_ids, token_ids[:, 1:] > 0), r"`padding_mask` must have the shape .*\(5, 9\)"),
        ((token_ids, token_ids < 0), "leave no token that follows another"),
        ((token_ids, (token_ids < 0) * -1e9), "`padding_mask` must be boolean.*; got float64"),
        ((token_ids, None, 0), "`batch_size` must be an integer, at least 1; got 0"),
    ]:
        with pytest.raises(ValueError, match=match):
            loss_by_position(model, *given)
