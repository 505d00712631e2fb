"""Decays, positions and activations of `LightningAttention`."""

import keras
import numpy as np
import pytest

from keras_recurrent.layers import LRPE, LightningAttention
from tests.layers.table import numpy


def decays(num_heads, **kwargs):
    return np.exp(LightningAttention(num_heads, head_dim=2, **kwargs).log_decay)


@pytest.mark.once
@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        # Slopes of two heads, then the first and third of four heads.
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        # TransNormerLLM-15B has the slopes of 32 heads and eight slopes of 64 heads.
        (40, [*2.0 ** (-np.arange(1, 33) / 4), *2.0 ** (-np.arange(1, 17, 2) / 8)]),
    ],
)
def test_decay_schedule_of_the_checkpoints(num_heads, slopes):
    slopes = np.array(slopes)
    for layer, factor in [(0, 1.00001), (1, 0.50001), (2, 0.00001)]:
        found = decays(num_heads, layer_index=layer, num_layers=3)
        np.testing.assert_allclose(-np.log(found), slopes * factor, rtol=1e-6)
    np.testing.assert_allclose(-np.log(decays(num_heads)), slopes * 1.00001, rtol=1e-6)


@pytest.mark.once
def test_lrpe_has_the_published_angles():
    """Over all heads, as the code of TransNormerLLM has them."""
    layer = LRPE()
    layer.build((None, None, 2, 3))
    theta = numpy(layer.theta).ravel()
    np.testing.assert_allclose(theta, 10_000.0 ** (-np.arange(6) / 3), rtol=1e-6)


def test_lrpe_in_bfloat16_computes_angles_in_float32():
    layer = LRPE(dtype="bfloat16")
    x = np.ones((1, 1, 1, 4), "float32")
    turned = layer(x, positions=np.array([[1001]]))
    assert keras.backend.standardize_dtype(turned.dtype) == "bfloat16"
    assert layer(keras.Input((5, 1, 4)), keras.Input((5,), dtype="int32")).dtype == "bfloat16"
    angle = 1001 * 10_000.0 ** (-np.arange(4) / 2)
    expected = np.concatenate([np.cos(angle), np.sin(angle)])
    found = numpy(keras.ops.cast(turned, "float32")).ravel()
    np.testing.assert_allclose(found, expected, atol=2**-8)
