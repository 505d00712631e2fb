"""`LowerBounds`, and layers with a lower bound of their forget gates."""

import keras
import numpy as np
import pytest

from keras_recurrent import layers
from tests.layers import loops
from tests.layers.gradients import call_with, gradients
from tests.layers.table import WIDTH, assert_close, assert_rejects, inputs, numpy
from tests.ops.native import precision

BETA = np.linspace(0.05, 0.95, WIDTH)


def bound(beta=BETA):
    return np.log(np.stack([beta, 1 - beta])).astype("float32")


def softmax(logits):
    logits = np.asarray(logits, "float64")
    exp = np.exp(logits - logits.max(axis=0))
    return exp / exp.sum(axis=0)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_lower_bounds_near_0_and_1_keep_their_digits(row):
    """A bound, or 1 minus a bound, of 1e-20 is rounded to 0."""
    layer = layers.LowerBounds(3)
    layer.build((None, None, WIDTH))
    logits = np.zeros((3, WIDTH))
    logits[row] = 46.0
    layer.logits.assign(logits)
    p = softmax(logits)
    expected = np.log([[p[1], p[0] + p[2]], [p[1] + p[2], p[0]]])
    np.testing.assert_allclose(numpy(layer(inputs())), expected, rtol=1e-5, atol=1e-19)

    def loss(tensors):
        return keras.ops.sum(keras.ops.sin(call_with(layer, tensors, inputs())))

    (gradient,) = gradients(loss, [logits.astype("float32")])
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0


@pytest.mark.once
def test_lower_bounds_are_float32_under_16_bit_policies():
    for policy in ("mixed_bfloat16", "bfloat16"):
        layer = layers.LowerBounds(2, dtype=policy)
        assert keras.backend.standardize_dtype(layer(inputs()).dtype) == "float32"
        assert layer(keras.Input((None, WIDTH))).dtype == "float32"
        assert layer.logits.dtype == "float32"
    with precision("float64"):
        layer = layers.LowerBounds(2, dtype="float64")
        assert keras.backend.standardize_dtype(layer(inputs()).dtype) == "float64"


@pytest.mark.parametrize(
    "mask", [None, np.arange(8) % 3 < [[2], [1], [3]]], ids=["all real", "padding"]
)
def test_bidirectional_hgrn2_sums_both_directions(mask):
    layer, x = layers.BidirectionalHGRN2(expand_ratio=4), inputs()
    y = layer(x, lower_bound=bound(), mask=mask)
    w = {weight.path.split("/", 2)[2]: numpy(weight.value) for weight in layer.weights}
    config = {"expand_ratio": 4, "gate_activation": "silu", "input_activation": "linear"}

    def recall(tokens):
        unit = loops.HGRN2(w, config, BETA)
        return np.stack([unit.recall(token) for token in tokens])

    expected = np.zeros(x.shape)
    for row in range(3):
        real = np.ones(8, bool) if mask is None else mask[row]
        tokens = x[row, real].astype("float64")
        o = loops.norm(recall(tokens) + recall(tokens[::-1])[::-1], 1e-5)
        expected[row, real] = o * w["norm/scale"] @ w["o_proj/kernel"]
    assert_close(y, expected.astype("float32"), where=mask)


@pytest.mark.once
@pytest.mark.parametrize(
    "layer",
    [layers.HGRN2(expand_ratio=4), layers.HGRN(), layers.BidirectionalHGRN2(expand_ratio=4)],
    ids=str,
)
def test_layers_reject_lower_bounds_of_other_shapes(layer):
    for x in (inputs(), keras.Input((None, WIDTH))):
        for shape in ((WIDTH,), (3, 2, WIDTH), (2, WIDTH + 1)):
            assert_rejects(
                r"`lower_bound` must have the shape \(2, 8\)",
                layer,
                x,
                lower_bound=np.zeros(shape, "float32"),
            )
