"""Streaming layers of one's own, written from what the docstring of `StreamingLayer` says."""

import keras
import numpy as np
import pytest

from keras_recurrent.layers import HGRN2, RGLRU, LocalAttention, StreamingLayer, Tokens
from keras_recurrent.layers.tokens import find_tokens
from keras_recurrent.ops import linear_scan
from tests.layers import loops
from tests.layers.table import WIDTH, assert_close, inputs, numpy
from tests.layers.test_streaming import MASKS, SEGMENTS, in_parts


@keras.saving.register_keras_serializable("tests")
class Composite(StreamingLayer):
    """Layers of several kinds, one behind the other."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = {
            "attention": LocalAttention(2, head_dim=4, sliding_window=3),
            "rg_lru": RGLRU(num_blocks=2),
            "hgrn2": HGRN2(expand_ratio=4, conv_size=2),
        }

    def build(self, input_shape):
        super().build(input_shape)
        for layer in self.inner.values():
            layer.build(input_shape)

    def streaming_sublayers(self):
        return self.inner

    def stream(self, inputs, tokens, state):
        x, after = inputs, {}
        for name, layer in self.inner.items():
            x, after[name] = layer(
                x, tokens=tokens, initial_state=state.get(name), return_state=True
            )
        return x, after


@keras.saving.register_keras_serializable("tests")
class RunningMean(StreamingLayer):
    """The mean of a document's tokens so far, times a `scale` that is an argument of the call."""

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


def check_streaming(layer):
    """Parts equal the whole, with masks and segments, from a state and from none."""
    x = inputs()
    for mask in (None, MASKS["padding anywhere"]):
        for segment_ids in SEGMENTS.values():
            whole = layer(x, mask=mask, segment_ids=segment_ids, return_state=True)
            output, state = in_parts(layer, x, mask, segment_ids, [4])
            assert_close(output, numpy(whole[0]), where=mask)
            assert_close(state, whole[1])
            initial = layer.get_initial_state(3, max_length=6)
            again = layer(x, mask=mask, segment_ids=segment_ids, initial_state=initial)
            assert_close(again, numpy(whole[0]), where=mask)
            output = layer(x, mask=mask, segment_ids=segment_ids)
            assert_close(output, numpy(whole[0]), where=mask)


@pytest.mark.once
def test_a_composite_layer(tmp_path):
    layer = Composite()
    check_streaming(layer)
    names = ["attention", "hgrn2", "position", "rg_lru", "segment"]
    assert list(layer.state_spec()) == list(layer.get_initial_state(1)) == names
    model = keras.Sequential([keras.Input((None, WIDTH)), layer])
    model.save(tmp_path / "model.keras")
    x = inputs()
    assert_close(keras.models.load_model(tmp_path / "model.keras")(x), numpy(layer(x)))


def test_a_layer_with_positions_and_arguments():
    layer, x, mask = RunningMean(), inputs(), MASKS["padding anywhere"]
    for segment_ids in SEGMENTS.values():
        wanted = loops.run(RunningMeanLoop, x, mask, segment_ids).astype("float32")
        assert_close(layer(x, mask=mask, segment_ids=segment_ids), wanted, where=mask)
        doubled = layer(x, mask=mask, segment_ids=segment_ids, scale=2.0)
        assert_close(doubled, 2 * wanted, where=mask)
    check_streaming(layer)
    for sequence in (x, keras.Input((None, WIDTH))):
        with pytest.raises(ValueError, match="`scale` must be above 0; got -1"):
            layer(sequence, scale=-1.0)
        with pytest.raises(TypeError, match="`RunningMean` got the call argument 'shift'"):
            layer(sequence, shift=1.0)


@pytest.mark.once
def test_what_is_handed_down_is_checked():
    layer, x = LocalAttention(2, head_dim=4, sliding_window=3), inputs()
    tokens, _ = find_tokens(x, uses_position=True)
    with pytest.raises(ValueError, match="`tokens` must be the `Tokens` that the outer layer"):
        layer(x, tokens=np.zeros((3, 8)))
    with pytest.raises(ValueError, match=r"`tokens` have no `position`.*`streaming_sublayers`"):
        layer(x, tokens=Tokens())
    with pytest.raises(ValueError, match="`initial_state` must be the layer's part"):
        layer(x, tokens=tokens, initial_state=layer.get_initial_state(3))
    for sizes in ((0,), (-1,), (2, 0), (2, 1.5)):
        with pytest.raises(ValueError, match="must be an integer, at least 1"):
            layer.get_initial_state(*sizes)

    class WithoutState(StreamingLayer):
        def stream(self, inputs, tokens, state):
            return inputs

    with pytest.raises(TypeError, match="`stream` of `WithoutState` must return a pair"):
        WithoutState()(x[:2])

    class WithoutStream(StreamingLayer):
        pass

    with pytest.raises(NotImplementedError, match=r"must define `stream\(inputs, tokens, state\)`"):
        WithoutStream()(x)


@pytest.mark.once
def test_a_layer_without_a_part_of_its_own():
    class Doubled(StreamingLayer):
        def stream(self, inputs, tokens, state):
            return 2 * inputs, {}

    _, state = Doubled()(inputs(), return_state=True)
    assert list(state) == ["segment"]
