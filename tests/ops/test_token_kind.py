"""`token_kind` from masks, segments and the previous segment, against a loop over the tokens."""

import keras
import numpy as np
import pytest

from keras_recurrent.ops import token_kind


def walk(mask, segments, previous):
    """previous: the segment before the row, -1 for none, None to go on."""
    kinds = []
    for real, segment in zip(mask, segments, strict=True):
        if not real:
            kinds.append(2)
            continue
        kinds.append(0 if previous is None or previous == segment else 1)
        previous = segment
    return kinds


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("before", ["nothing", "a state", "segments"])
def test_as_a_walk_along_the_row(masked, packed, before):
    rng = np.random.default_rng(0)
    batch, length = 20, 9
    mask = rng.random((batch, length)) < 0.6 if masked else None
    segments = np.sort(rng.integers(0, 4, (batch, length)), axis=1) if packed else None
    previous = rng.integers(-1, 2, batch).astype("int32") if before == "segments" else None
    kinds = token_kind(
        np.zeros((batch, length, 1)),
        mask,
        segments,
        previous,
        initial_state=None if before == "nothing" else np.zeros(batch),
    )
    assert keras.backend.standardize_dtype(kinds.dtype) == "int8"
    for row, result in enumerate(keras.ops.convert_to_numpy(kinds)):
        first = {"nothing": -1, "a state": None, "segments": None}[before]
        if previous is not None:
            first = previous[row]
            if not packed and first >= 0:
                first = 0  # without segments, a row goes on whatever its number was
        expected = walk(
            mask[row] if masked else [True] * length,
            segments[row] if packed else [0] * length,
            first,
        )
        np.testing.assert_array_equal(result, expected)


def test_a_negative_segment_says_that_nothing_was_seen():
    """As the docstrings of `token_kind` and of `StreamingLayer` have it."""
    for segments, wanted in [
        ([[-1, -1, 0, -1]], [[0, 0, 1, 1]]),
        ([[-2, -2, 0, -2]], [[1, 0, 1, 1]]),
    ]:
        kinds = token_kind(np.zeros((1, 4)), segment_ids=np.array(segments))
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(kinds), wanted)
    for previous, wanted in ((-2, 1), (-1, 1), (0, 0), (3, 0)):
        kinds = token_kind(np.zeros((1, 1)), previous_segment_id=np.array([previous], "int32"))
        assert int(kinds[0, 0]) == wanted


def test_sequences_without_tokens():
    for mask in (None, np.ones((2, 0), bool)):
        assert token_kind(np.zeros((2, 0, 3)), mask).shape == (2, 0)


@pytest.mark.once
@pytest.mark.parametrize("text", ["abc", {"a": 1}])
def test_what_is_no_tensor(text):
    x = np.zeros((1, 3, 1))
    with pytest.raises(ValueError, match="`token_kind`: `like` must be a tensor"):
        token_kind(text)
    with pytest.raises(ValueError, match="`token_kind`: `mask` must be"):
        token_kind(x, mask=text)


def test_in_a_symbolic_graph(tmp_path):
    mask, segments = (keras.Input((None,), dtype=dtype) for dtype in ("bool", "int32"))
    kinds = token_kind(segments, mask, segments)
    assert kinds.shape == (None, None)
    assert kinds.dtype == "int8"
    keras.Model([mask, segments], kinds).save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    feed = np.array([[True, False, True]]), np.array([[0, 0, 1]], "int32")
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(feed)), [[1, 2, 1]])


def test_lists_are_taken():
    kinds = token_kind(np.zeros((1, 3)), [[True, False, True]], [[0, 0, 1]], [0])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(kinds), [[0, 2, 1]])


@pytest.mark.once
def test_what_does_not_fit_is_said():
    x = np.zeros((2, 5, 3), "float32")
    for name, shape in [("mask", (2, 3)), ("segment_ids", (5,)), ("previous_segment_id", (3,))]:
        with pytest.raises(ValueError, match=f"`token_kind`: `{name}` must have the shape"):
            token_kind(x, **{name: np.ones(shape, "int32")})
    for name in ("mask", "segment_ids", "previous_segment_id"):
        shape = 2 if name == "previous_segment_id" else (2, 5)
        with pytest.raises(ValueError, match=f"`token_kind`: `{name}` must be .*; got float32"):
            token_kind(x, **{name: np.zeros(shape, "float32")})  # a mask to be added to logits
    with pytest.raises(ValueError, match=r"`like` must have the shape \[batch, time, ...\]; got"):
        token_kind(np.zeros(5))
