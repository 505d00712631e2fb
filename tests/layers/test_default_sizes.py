"""Sizes that follow from the width: the rule, and a file that relies on it."""

import pathlib

import keras
import numpy as np
import pytest

from keras_recurrent import layers
from keras_recurrent.models import GriffinBackbone, HGRN2Backbone, HGRN2VisionBackbone
from tests.layers.table import inputs, numpy
from tests.models.test_hgrn2_image_classifier import SIZES as VISION_SIZES
from tests.models.tiny import FAMILIES

pytestmark = pytest.mark.once

SAVED = pathlib.Path(__file__).parents[1] / "data" / "saved_models"
# {width: the number of blocks or the size of a head}
NUM_BLOCKS = {1: 1, 2: 1, 3: 1, 4: 1, 7: 1, 8: 2, 10: 2, 12: 3, 16: 16, 20: 5, 24: 6, 32: 16}
NUM_BLOCKS |= {44: 11, 53: 1, 60: 15, 64: 16, 90: 15, 176: 16, 260: 13, 2560: 16}
OF_EVEN_WIDTH = {2: 1, 6: 1, 8: 2, 10: 1, 16: 4, 24: 6, 32: 16, 36: 9, 48: 12, 2560: 16}
EXPAND_RATIO = {1: 1, 3: 3, 7: 7, 8: 8, 64: 64, 100: 100, 127: 127, 128: 128, 130: 65, 132: 66}
EXPAND_RATIO |= {192: 96, 256: 128, 384: 128, 136: 68, 2560: 128, 8 * 131: 8, 258: 86}


@pytest.mark.once
def test_numbers_of_blocks():
    for width, number in NUM_BLOCKS.items():
        layer, block = layers.RGLRU(), layers.RecurrentBlock(width)
        layer.build((None, None, width))
        block.build((None, None, 3))
        assert layer.num_blocks == block.num_blocks == number, width
        assert block.rg_lru.recurrence_gate.kernel.shape[0] == number
    for width, number in OF_EVEN_WIDTH.items():
        layer = layers.CGLRU()
        layer.build((None, None, width))
        assert layer.num_blocks == number, width


@pytest.mark.once
@pytest.mark.parametrize("make", [layers.HGRN2, layers.BidirectionalHGRN2])
def test_sizes_of_heads(make):
    for width, ratio in EXPAND_RATIO.items():
        layer = make()
        layer.build((None, None, width))
        assert getattr(layer, "hgrn2", layer).expand_ratio == ratio, width
    for width, good in ((131, "128 or 192"), (262, "256 or 320")):
        with pytest.raises(ValueError, match=f"divisor of {width} .* such as {good}, or pass"):
            make().build((None, None, width))
        make(expand_ratio=1).build((None, None, width))


@pytest.mark.parametrize(
    "make",
    [
        *(layers.RGLRU, layers.CGLRU, layers.HGRN2, layers.BidirectionalHGRN2),
        lambda **kwargs: layers.RecurrentBlock(24, **kwargs),
    ],
)
def test_configurations(make):
    """None comes back, also once the layer is built; a number in a configuration stays."""
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


def test_a_saved_model():
    """Made on torch when the rule was new, of widths whose sizes no one gave."""
    model = keras.models.load_model(SAVED / "default_sizes.keras")
    then = np.load(SAVED / "default_sizes.npz")
    for name, output in model(then["x"]).items():
        np.testing.assert_allclose(numpy(output), then[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.once
def test_backbones_have_numbers():
    with pytest.raises(ValueError, match="`num_blocks` must be an integer"):
        GriffinBackbone(**{**FAMILIES["griffin"].sizes, "num_blocks": None})
    with pytest.raises(ValueError, match="`expand_ratio` must be an integer"):
        HGRN2Backbone(**{**FAMILIES["hgrn2"].sizes, "expand_ratio": None})
    with pytest.raises(ValueError, match="`expand_ratio` must be an integer"):
        HGRN2VisionBackbone(**{**VISION_SIZES, "expand_ratio": None})
