"""`LocalAttention`: weights, rotary positions and capacities of states."""

import keras
import numpy as np
import pytest

from keras_recurrent import layers
from tests.layers import loops
from tests.layers.table import WIDTH, assert_close, assert_rejects, inputs, numpy


def make(**kwargs):
    layer = layers.LocalAttention(**({"num_query_heads": 2, "head_dim": 4} | kwargs))
    layer.build((None, None, WIDTH))
    return layer


@pytest.mark.once
def test_weights_of_grouped_heads_have_their_shapes():
    layer = make(num_query_heads=6, num_key_value_heads=2)
    shapes = {weight.path.split("/", 1)[1]: tuple(weight.shape) for weight in layer.weights}
    assert shapes == {
        "q_proj/kernel": (8, 24),
        "k_proj/kernel": (8, 8),
        "v_proj/kernel": (8, 8),
        "o_proj/kernel": (24, 8),
        "o_proj/bias": (8,),
    }


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_partial_rotary_factor_matches_a_loop(factor):
    layer, x = make(partial_rotary_factor=factor, rope_max_wavelength=100), inputs(length=40)
    assert_close(layer(x), loops.run(loops.unit(layer), x).astype("float32"))


def test_attention_without_positions_ignores_the_order_of_tokens():
    layer, x = make(partial_rotary_factor=0), inputs()
    turned = np.concatenate([x[:, 6::-1], x[:, 7:]], axis=1)
    assert_close(layer(turned)[:, 7], layer(x)[:, 7])
    layer = make()
    assert np.abs(numpy(layer(turned))[:, 7] - numpy(layer(x))[:, 7]).max() > 1e-3


def test_global_attention_streams_only_with_a_max_length():
    layer, x = make(), inputs()
    whole = layer(x)
    for call in (
        lambda: layer(x, return_state=True),
        lambda: layer(keras.Input((None, WIDTH)), return_state=True),
        lambda: layer.get_initial_state(3),
    ):
        assert_rejects(r"Give the layer a `max_length`", call)
    assert not layer.keeps_state

    state = layer.get_initial_state(3, max_length=8)
    assert tuple(state["key"].shape) == (3, 8, 1, 4)
    left, state = layer(x[:, :4], initial_state=state, return_state=True)
    right, state = layer(x[:, 4:], initial_state=state, return_state=True)
    assert_close(left, whole[:, :4])
    assert_close(right, whole[:, 4:])
    np.testing.assert_array_equal(numpy(state["position"]), 8)


@pytest.mark.once
def test_capacity_of_a_state_is_the_smaller_of_window_and_max_length():
    window, both = make(sliding_window=6), make(sliding_window=6, max_length=4)
    global_attention = make(max_length=30)

    def capacity(layer, max_length=None):
        return layer.get_initial_state(2, max_length)["key"].shape[1]

    assert [capacity(window), capacity(window, 3), capacity(window, 100)] == [5, 3, 5]
    assert [capacity(both), capacity(both, 100)] == [4, 5]
    assert [
        capacity(global_attention),
        capacity(global_attention, 3),
        capacity(global_attention, 100),
    ] == [30, 3, 100]
    assert global_attention(inputs(), return_state=True)[1]["key"].shape[1] == 30


def test_decoding_past_the_window_matches_a_loop():
    layer, x = make(sliding_window=3), inputs(length=30)
    whole, state = loops.run(loops.unit(layer), x).astype("float32"), layer.get_initial_state(3)
    shapes = keras.tree.map_structure(lambda t: tuple(t.shape), state)
    for t in range(30):
        output, state = layer(x[:, t : t + 1], initial_state=state, return_state=True)
        assert_close(output, whole[:, t : t + 1])
        assert keras.tree.map_structure(lambda t: tuple(t.shape), state) == shapes


def test_full_state_of_global_attention_keeps_the_last_tokens():
    layer, x = make(partial_rotary_factor=0), inputs(length=12)
    state = layer.get_initial_state(3, max_length=4)
    for t in range(12):
        output, state = layer(x[:, t : t + 1], initial_state=state, return_state=True)
    assert_close(output, loops.run(loops.unit(layer), x[:, 7:])[:, -1:].astype("float32"))
