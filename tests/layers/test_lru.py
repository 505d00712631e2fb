"""Input multiplier of the linear recurrent units, and its derivative."""

import keras
import numpy as np
import pytest

from keras_recurrent.layers.block_diagonal import apply_blocks
from tests.layers.gradients import call_with, gradients
from tests.layers.table import built, inputs, numpy


@pytest.mark.parametrize("a_logit", [(-100.0, 0.0, 10.0, 14.0), (0.0, 14.0, 20.0, 100.0)])
def test_input_multiplier_is_exact_for_decays_from_0_to_1(a_logit):
    """1 - |a|^2 loses its digits, or the derivative of its root is infinite at |a| = 1."""
    layer, x = built("CGLRU"), inputs(length=4)
    layer.a_logit.assign(a_logit)
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
    multiplier = np.sqrt(-np.expm1(-16 * np.logaddexp(0, -np.array(a_logit)) * r))
    expected = np.tile(multiplier * i, 2) * alone[:, 2]
    np.testing.assert_allclose(numpy(layer(alone))[:, 2], expected, rtol=1e-5, atol=1e-20)
