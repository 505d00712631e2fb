"""Default numbers of blocks and head sizes, which follow from the width."""

import pathlib

import keras
import numpy as np
import pytest

from keras_recurrent import layers
from tests.layers.table import assert_rejects, inputs, numpy

pytestmark = pytest.mark.once

SAVED = pathlib.Path(__file__).parents[1] / "data" / "saved_models"
# {width: number of blocks}, for even widths of a complex layer too; {width: size of a head}.
NUM_BLOCKS = {1: 1, 2: 1, 3: 1, 4: 1, 7: 1, 8: 2, 10: 2, 12: 3, 16: 16, 20: 5, 24: 6, 32: 16}
NUM_BLOCKS |= {44: 11, 53: 1, 60: 15, 64: 16, 90: 15, 176: 16, 260: 13, 2560: 16}
COMPLEX_NUM_BLOCKS = {2: 1, 6: 1, 8: 2, 10: 1, 16: 4, 24: 6, 32: 16, 36: 9, 48: 12, 2560: 16}
EXPAND_RATIO = {1: 1, 3: 3, 7: 7, 8: 8, 64: 64, 100: 100, 127: 127, 128: 128, 130: 65, 132: 66}
EXPAND_RATIO |= {192: 96, 256: 128, 384: 128, 136: 68, 8 * 131: 8, 258: 86}


@pytest.fixture
def empty_weights():
    """Creates weights without values, whose initialization would take most of the time."""
    with keras.StatelessScope(initialize_variables=False):
        yield


@pytest.mark.usefixtures("empty_weights")
def test_default_number_of_blocks_follows_from_the_width():
    for width, number in NUM_BLOCKS.items():
        layer, block = layers.RGLRU(), layers.RecurrentBlock(width)
        layer.build((None, None, width))
        block.build((None, None, 3))
        assert layer.num_blocks == block.num_blocks == number, width
        assert block.rg_lru.recurrence_gate.kernel.shape[0] == number
    for width, number in COMPLEX_NUM_BLOCKS.items():
        layer = layers.CGLRU()
        layer.build((None, None, width))
        assert layer.num_blocks == number, width


@pytest.mark.usefixtures("empty_weights")
@pytest.mark.parametrize("make", [layers.HGRN2, layers.BidirectionalHGRN2])
def test_default_expand_ratio_follows_from_the_width(make):
    for width, ratio in EXPAND_RATIO.items():
        layer = make()
        layer.build((None, None, width))
        assert getattr(layer, "hgrn2", layer).expand_ratio == ratio, width
    for width, advice in ((131, "128 or 192"), (262, "256 or 320")):
        match = f"divisor of {width} .* such as {advice}, or pass"
        assert_rejects(match, make().build, (None, None, width))
        make(expand_ratio=1).build((None, None, width))


@pytest.mark.parametrize(
    "make",
    [
        *(layers.RGLRU, layers.CGLRU, layers.HGRN2, layers.BidirectionalHGRN2),
        lambda **kwargs: layers.RecurrentBlock(24, **kwargs),
    ],
)
def test_config_keeps_a_default_size_as_none_and_an_explicit_size(make):
    layer, x = make(), np.tile(inputs(), 3)
    name = "num_blocks" if hasattr(layer, "num_blocks") else "expand_ratio"
    output = layer(x)
    config = layer.get_config()
    assert config[name] is None
    again = type(layer).from_config(config)
    again.build(x.shape)
    again.set_weights(layer.get_weights())
    np.testing.assert_array_equal(numpy(again(x)), numpy(output))
    explicit = type(layer).from_config({**config, name: 4})
    explicit.build(x.shape)
    assert explicit.get_config()[name] == 4


def test_saved_model_of_default_sizes_loads():
    """A changed default breaks files that were saved before, here on torch."""
    model = keras.models.load_model(SAVED / "default_sizes.keras")
    saved = np.load(SAVED / "default_sizes.npz")
    for name, output in model(saved["x"]).items():
        np.testing.assert_allclose(numpy(output), saved[name], rtol=1e-4, atol=1e-5, err_msg=name)
