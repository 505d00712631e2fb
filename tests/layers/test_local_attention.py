"""`LocalAttention`: weights, rotary positions and capacities of states."""

import keras
import pytest

from keras_recurrent import layers
from tests.layers.table import WIDTH, assert_rejects, inputs


def make(**kwargs):
    layer = layers.LocalAttention(**({"num_query_heads": 2, "head_dim": 4} | kwargs))
    layer.build((None, None, WIDTH))
    return layer


def test_global_attention_without_a_max_length_has_no_state():
    layer, x = make(), inputs()
    for call in (
        lambda: layer(x, return_state=True),
        lambda: layer(keras.Input((None, WIDTH)), return_state=True),
        lambda: layer.get_initial_state(3),
    ):
        assert_rejects(r"Give the layer a `max_length`", call)
    assert not layer.keeps_state


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
