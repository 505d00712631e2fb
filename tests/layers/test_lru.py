"""Input multiplier of the linear recurrent units, and its derivative."""

import keras
import numpy as np
import pytest

from keras_recurrent.layers.block_diagonal import apply_blocks
from tests.layers import loops
from tests.layers.gradients import call_with, gradients
from tests.layers.table import assert_close, built, inputs, numpy
from tests.layers.test_streaming import MASKS, SEGMENTS, call_in_parts


@pytest.mark.parametrize("name", ["RGLRU", "CGLRU", "RecurrentBlock", "RecurrentBlock with CGLRU"])
def test_scaled_first_input_matches_a_loop(name):
    layer, x, mask = built(name, scale_first_input=True), inputs(), MASKS["padding anywhere"]
    unit = loops.unit(layer)
    for given in ({}, {"mask": mask, "segment_ids": SEGMENTS["documents"]}):
        expected = loops.run(unit, x, **given).astype("float32")
        assert_close(layer(x, **given), expected, where=given.get("mask"))
    x = np.where(mask[..., None], x, np.nan)
    output, _ = call_in_parts(layer, x, mask, SEGMENTS["documents"], [1, 4])
    assert_close(output, expected, where=mask)


def test_gradient_of_a_scaled_first_input_matches_finite_differences():
    """The derivative of h = sqrt(1 - a^2) i x at the first token of a document is wrong."""
    layer, x = built("RGLRU", scale_first_input=True), inputs(length=4)
    mask = np.array([[1, 1, 0, 1]] * 3) > 0
    x = np.where(mask[..., None], x, 1e4)
    weights = numpy([weight.value for weight in layer.trainable_variables])
    each = np.arange(4) * np.ones((3, 1), "int32")

    def loss(values):
        weights, x = values
        h = call_with(layer, weights, x, mask=mask, segment_ids=each)
        return keras.ops.sum(keras.ops.where(mask[..., None], keras.ops.sin(h), 0.0))

    found = gradients(loss, [weights, x])
    assert all(np.isfinite(g).all() for g in keras.tree.flatten(found))
    step, logit = 1e-2, [w.path for w in layer.trainable_variables].index(layer.a_logit.path)

    def moved(sign):
        by = [w + sign * step * (i == logit) for i, w in enumerate(weights)]
        unit = loops.unit(layer, by)
        return np.sin(loops.run(unit, x, mask, each))[mask].sum()

    difference = (moved(1) - moved(-1)) / (2 * step)
    np.testing.assert_allclose(found[0][logit].sum(), difference, rtol=1e-3)


@pytest.mark.parametrize("a_logit", [-100.0, 0.0, 10.0, 14.0, 20.0, 100.0])
def test_input_multiplier_is_exact_for_decays_from_0_to_1(a_logit):
    """1 - |a|^2 loses its digits, or the derivative of its root is infinite at |a| = 1."""
    layer, x = built("CGLRU"), inputs(length=4)
    layer.a_logit.assign(np.full(4, a_logit))
    weights = numpy([weight.value for weight in layer.trainable_variables])

    def loss(weights):
        return keras.ops.sum(keras.ops.sin(call_with(layer, weights, x)))

    assert all(np.isfinite(gradient).all() for gradient in gradients(loss, weights))

    # With a single nonzero input, h is the product of gate, multiplier and input. At 100 the decay
    # is within 1e-43 of 1, the smallest difference in float32.
    alone = np.zeros_like(x)
    alone[:, 2] = x[:, 2]
    gates = map(numpy, apply_blocks((layer.recurrence_gate, layer.input_gate), alone[:, 2:3]))
    r, i = (1 / (1 + np.exp(-gate.reshape(3, 4).astype("float64"))) for gate in gates)
    multiplier = np.sqrt(-np.expm1(-16 * np.logaddexp(0, -a_logit) * r))
    expected = np.tile(multiplier * i, 2) * alone[:, 2]
    np.testing.assert_allclose(numpy(layer(alone))[:, 2], expected, rtol=1e-5, atol=1e-20)
