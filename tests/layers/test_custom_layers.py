"""Custom streaming layers, written by the docstring of `StreamingLayer`."""

import keras
import numpy as np
import pytest

from keras_recurrent.layers import LocalAttention, StreamingLayer, Tokens
from keras_recurrent.layers.tokens import compute_tokens
from keras_recurrent.ops import linear_scan
from tests.layers import loops
from tests.layers.table import WIDTH, assert_close, assert_rejects, inputs
from tests.layers.test_streaming import MASKS, SEGMENTS, assert_parts_equal_the_whole

pytestmark = pytest.mark.once


class RunningMean(StreamingLayer):
    """Mean of a document's tokens so far, times the call argument `scale`."""

    uses_position = True

    def check_arguments(self, inputs, scale=1.0, **kwargs):
        super().check_arguments(inputs, **kwargs)
        if scale <= 0:
            raise ValueError(f"`scale` must be above 0; got {scale}.")

    def own_state_spec(self, batch_size=None):
        return {"total": self.array_spec(batch_size, self.width)}

    def stream(self, inputs, tokens, state, scale=1.0):
        total, last = linear_scan(
            inputs,
            keras.ops.zeros_like(inputs),
            initial_state=state.get("total"),
            token_kind=tokens.kind,
        )
        count = keras.ops.cast(tokens.position + 1, inputs.dtype)[..., None]
        return scale * total / count, {"total": last}


class RunningMeanLoop:
    def __init__(self):
        self.seen = []

    def step(self, x):
        self.seen.append(x)
        return np.mean(self.seen, axis=0)


def assert_streams(layer):
    """Asserts that parts equal the whole, and that no state equals the initial state."""
    x = inputs()
    for mask in (None, MASKS["padding anywhere"]):
        for segment_ids in SEGMENTS.values():
            assert_parts_equal_the_whole(layer, x, mask, segment_ids, [4])
            output = layer(x, mask=mask, segment_ids=segment_ids)
            state = layer.get_initial_state(3, max_length=6)
            again = layer(x, mask=mask, segment_ids=segment_ids, initial_state=state)
            assert_close(again, output, where=mask)


def test_layer_with_positions_and_call_arguments_streams_and_checks_them():
    layer, x, mask = RunningMean(), inputs(), MASKS["padding anywhere"]
    for segment_ids in SEGMENTS.values():
        expected = loops.run(RunningMeanLoop, x, mask, segment_ids).astype("float32")
        assert_close(layer(x, mask=mask, segment_ids=segment_ids), expected, where=mask)
        doubled = layer(x, mask=mask, segment_ids=segment_ids, scale=2.0)
        assert_close(doubled, 2 * expected, where=mask)
    assert_streams(layer)
    for sequence in (x, keras.Input((None, WIDTH))):
        assert_rejects("`scale` must be above 0; got -1", layer, sequence, scale=-1.0)
        with pytest.raises(TypeError, match="`RunningMean` got the call argument 'shift'"):
            layer(sequence, shift=1.0)


def test_streaming_layer_rejects_invalid_tokens_states_and_definitions():
    layer, x = LocalAttention(2, head_dim=4, sliding_window=3), inputs()
    tokens, _ = compute_tokens(x, uses_position=True)
    assert_rejects(
        "`tokens` must be the `Tokens` that the outer layer", layer, x, tokens=np.zeros((3, 8))
    )
    match, position = "`initial_state` must be the layer's part", r"`tokens` have no `position`"
    assert_rejects(rf"{position}.*`streaming_sublayers`", layer, x, tokens=Tokens())
    state = layer.get_initial_state(3)
    assert_rejects(match, layer, x, tokens=tokens, initial_state=state)
    for sizes in ((0,), (-1,), (2, 0), (2, 1.5)):
        assert_rejects("must be an integer, at least 1", layer.get_initial_state, *sizes)

    class WithoutState(StreamingLayer):
        def stream(self, inputs, tokens, state):
            return inputs

    with pytest.raises(TypeError, match="`stream` of `WithoutState` must return a pair"):
        WithoutState()(x[:2])

    class WithoutStream(StreamingLayer):
        pass

    with pytest.raises(NotImplementedError, match=r"must define `stream\(inputs, tokens, state\)`"):
        WithoutStream()(x)


def test_layer_without_state_arrays_keeps_the_segment():
    class Doubled(StreamingLayer):
        def stream(self, inputs, tokens, state):
            return 2 * inputs, {}

    _, state = Doubled()(inputs(), return_state=True)
    assert list(state) == ["segment"]
