"""`token_kind` from masks, segments and previous segments, against a loop over the tokens."""

import keras
import numpy as np
import pytest

from keras_recurrent.backends.constants import CONTINUES, PADDING, STARTS
from keras_recurrent.ops import token_kind


def walk(mask, segments, previous):
    """The kinds of one sequence. previous: the segment before it, -1 if none, None if any."""
    kinds = []
    for real, segment in zip(mask, segments, strict=True):
        if not real:
            kinds.append(PADDING)
            continue
        kinds.append(CONTINUES if previous is None or previous == segment else STARTS)
        previous = segment
    return kinds


def assert_equals_loop(kinds, mask, segments, previous, has_state):
    """Compares the kinds of a batch with a loop; absent masks and segments are None."""
    for i, kinds_of_row in enumerate(keras.ops.convert_to_numpy(kinds)):
        first = None if has_state else -1
        if previous is not None:
            # Without segments, a sequence continues any document.
            first = previous[i] if segments is not None else min(previous[i], 0)
        mask_of_row = [True] * len(kinds_of_row) if mask is None else mask[i]
        segments_of_row = [0] * len(kinds_of_row) if segments is None else segments[i]
        np.testing.assert_array_equal(kinds_of_row, walk(mask_of_row, segments_of_row, first))


@pytest.mark.parametrize("mask_dtype", [None, "bool", "uint8"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("before", ["nothing", "a state", "segments"])
def test_token_kind_equals_a_loop_over_tokens(mask_dtype, packed, before):
    """A token starts a document that it continues, or the reverse, or padding is confused."""
    rng = np.random.default_rng(0)
    batch, length = 20, 9
    mask = (rng.random((batch, length)) < 0.6).astype(mask_dtype) if mask_dtype else None
    segments = np.sort(rng.integers(0, 4, (batch, length)), axis=1) if packed else None
    previous = rng.integers(-1, 2, batch).astype("int32") if before == "segments" else None
    state = None if before == "nothing" else np.zeros(batch)
    x = np.zeros((batch, length, 1))
    kinds = token_kind(x, mask, segments, previous, initial_state=state)
    assert keras.backend.standardize_dtype(kinds.dtype) == "int8"
    assert_equals_loop(kinds, mask, segments, previous, has_state=state is not None)


@pytest.mark.parametrize(
    ("segments", "kinds"),
    [([-1, -1, 0, -1], [0, 0, 1, 1]), ([-2, -2, 0, -2], [1, 0, 1, 1])],
)
def test_segment_minus_one_continues_the_initial_segment(segments, kinds):
    """Without a previous segment, whose id is then -1, another id than -1 starts a document."""
    result = token_kind(np.zeros((1, 4)), segment_ids=np.array([segments]))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(result), [kinds])


@pytest.mark.parametrize(("previous", "kind"), [(-2, STARTS), (-1, STARTS), (0, 0), (3, 0)])
def test_negative_previous_segment_means_no_previous_token(previous, kind):
    """A state is read although its sequence has no token yet, or is reset although it has."""
    result = token_kind(np.zeros((1, 1)), previous_segment_id=np.array([previous], "int32"))
    assert int(result[0, 0]) == kind


@pytest.mark.parametrize("mask", [None, np.ones((2, 0), bool)])
def test_token_kind_of_no_tokens_is_empty(mask):
    assert token_kind(np.zeros((2, 0, 3)), mask).shape == (2, 0)


def test_token_kind_in_a_saved_model_equals_eager_call(tmp_path):
    """A functional model has wrong shapes or dtypes, or cannot be saved."""
    mask, segments = (keras.Input((None,), dtype=dtype) for dtype in ("bool", "int32"))
    kinds = token_kind(segments, mask, segments)
    assert kinds.shape == (None, None)
    assert kinds.dtype == "int8"
    keras.Model([mask, segments], kinds).save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    inputs = np.array([[True, False, True]]), np.array([[0, 0, 1]], "int32")
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(inputs)), [[1, 2, 1]])


def test_token_kind_accepts_lists():
    kinds = token_kind(np.zeros((1, 3)), [[True, False, True]], [[0, 0, 1]], [0])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(kinds), [[0, 2, 1]])
