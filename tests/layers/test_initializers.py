"""Initial values of weights."""

import keras
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent import layers
from tests.layers.table import assert_rejects, numpy

pytestmark = pytest.mark.once


def decay(a_logit):
    return 1 / (1 + np.exp(-np.asarray(a_logit, "float64")))


@pytest.mark.parametrize(
    ("identifier", "power", "low", "high"),
    [("griffin", 8, 0.9, 0.999), ("recurrentgemma", 2, 0.9**2, 0.999**2)],
)
@pytest.mark.parametrize("layer_class", [layers.RGLRU, layers.CGLRU])
def test_initial_decays_are_uniform(layer_class, identifier, power, low, high):
    layer = layer_class(num_blocks=512, a_initializer=identifier)
    layer.build((None, None, 8192))
    u = np.sort(decay(numpy(layer.a_logit.value)) ** power)
    assert low - 1e-6 < u[0] < low + 0.005 * (high - low)
    assert high - 0.005 * (high - low) < u[-1] < high + 1e-6
    assert_sorted_values_are_uniform((u - low) / (high - low))


def assert_sorted_values_are_uniform(u):
    """Kolmogorov-Smirnov test, which rejects one of 10^5 uniform samples."""
    assert np.abs(u - (np.arange(len(u)) + 0.5) / len(u)).max() < 2.5 / np.sqrt(len(u))


def test_decay_logit_near_1_keeps_its_digits():
    """1 - a computed as a difference loses three digits at a^8 = 0.999."""
    a_logit = numpy(layers.DecayLogit(0.999, 0.999, power=8.0)((4,)))
    a = np.float64(np.float32(0.999)) ** (1 / 8)
    np.testing.assert_allclose(a_logit, np.log(a) - np.log1p(-a), rtol=3e-7)


def test_initial_phases_are_uniform():
    layer = layers.CGLRU(num_blocks=512)
    layer.build((None, None, 8192))
    turn = np.sort(8 * numpy(layer.theta.value)) / (2 * np.pi)
    assert turn[0] >= 0
    assert turn[-1] < 1
    assert_sorted_values_are_uniform(turn)


@pytest.mark.parametrize("layer_class", [layers.RGLRU, layers.CGLRU])
def test_gates_are_scaled_by_the_fan_in_of_a_block(layer_class):
    layer = layer_class(num_blocks=16)
    layer.build((None, None, 1024))
    kernels = [numpy(gate.kernel.value) for gate in (layer.recurrence_gate, layer.input_gate)]
    for kernel in kernels:
        assert kernel.shape[:2] == (16, 64)
        np.testing.assert_allclose(kernel.var(), 1 / 64, rtol=0.03)
        np.testing.assert_allclose(kernel.var(axis=(1, 2)), 1 / 64, rtol=0.2)
    assert not np.allclose(*kernels)
    for gate in (layer.recurrence_gate, layer.input_gate):
        np.testing.assert_array_equal(numpy(gate.bias.value), 0)


def test_convolution_is_scaled_by_the_fan_in_of_its_filter():
    layer = layers.CausalConv1D(kernel_size=4)
    layer.build((None, None, 4096))
    np.testing.assert_allclose(numpy(layer.kernel.value).var(), 1 / 4, rtol=0.05)


def test_linear_layers_of_a_block_have_different_initial_weights():
    layer = layers.RecurrentBlock(8, num_blocks=2)
    layer.build((None, None, 8))
    kernels = [numpy(inner.kernel.value) for inner in (layer.linear_x, layer.linear_y)]
    assert not np.allclose(*kernels)


@pytest.mark.parametrize("layer_class", [layers.RGLRU, layers.CGLRU])
@pytest.mark.parametrize(
    ("initializer", "low", "high"),
    [
        ("zeros", 0.5, 0.5),
        (keras.initializers.Constant(2.0), decay(2), decay(2)),
        (layers.DecayLogit(0.5, 0.6, power=1.0), 0.5, 0.6),
    ],
)
def test_a_initializer_accepts_any_keras_initializer(layer_class, initializer, low, high):
    layer = layer_class(num_blocks=2, a_initializer=initializer)
    layer = layer_class.from_config(layer.get_config())
    layer.build((None, None, 8))
    a = decay(numpy(layer.a_logit.value))
    assert low - 1e-6 <= a.min() <= a.max() <= high + 1e-6


@pytest.mark.parametrize(
    "make",
    [
        lambda **kwargs: layers.HGRN2(expand_ratio=8, **kwargs),
        lambda **kwargs: layers.HGRN2(expand_ratio=8, conv_size=8, **kwargs),
        lambda **kwargs: layers.BidirectionalHGRN2(expand_ratio=8, **kwargs),
        layers.HGRN,
    ],
    ids=["HGRN2", "with convolutions", "BidirectionalHGRN2", "HGRN"],
)
def test_decay_logit_as_forget_bias_keeps_the_influence_of_old_tokens(make):
    """An HGRN2 as the only recurrent layer does not learn from tokens 40 steps back."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(4, 64, 32)).astype("float32")

    def influence(layer, steps_back):
        """Returns the relative change of the last output if an earlier token is set to 0."""
        changed = x.copy()
        changed[:, 63 - steps_back] = 0
        before, after = (numpy(layer(inputs))[:, 63] for inputs in (x, changed))
        return np.abs(after - before).mean() / np.abs(before).mean()

    assert influence(make(), 40) < 1e-4
    layer = make(f_bias_initializer=layers.DecayLogit(0.1, 0.9, power=64))
    layer = type(layer).from_config(layer.get_config())
    assert influence(layer, 40) > 0.25 * influence(layer, 10) > 0.005
    assert [v.name for v in keras_recurrent.exclude_from_weight_decay(None, layer)] == ["f_bias"]


def test_decay_logit_serializes_with_its_seed():
    initializer = layers.DecayLogit(0.2, 0.3, power=4.0, seed=7)
    again = keras.initializers.deserialize(keras.initializers.serialize(initializer))
    np.testing.assert_array_equal(numpy(initializer((5,))), numpy(again((5,))))
    assert numpy(initializer((5,), dtype="float16")).dtype == "float16"


@pytest.mark.parametrize(
    ("bounds", "power"),
    [((0.0, 0.5), 8), ((0.9, 1.0), 8), ((0.9, 0.8), 8), ((0.9, 0.99), 0.0), ((0.9, 0.99), -1.0)],
)
def test_decay_logit_rejects_bounds_outside_0_to_1_and_powers_up_to_0(bounds, power):
    assert_rejects(r"`minval`|`power`", layers.DecayLogit, *bounds, power=power)
