"""Under a policy of 16 bits, layers compute in float32 and round once.

Nothing else rounds with these inputs and weights of linear layers: outputs must be the 16-bit
numbers closest to the exact ones.
"""

import re
import warnings

import keras
import numpy as np
import pytest

from keras_recurrent import layers
from keras_recurrent.layers.reversible_embedding import ReversibleEmbedding
from tests.layers.gradients import call_with, gradients
from tests.layers.table import numpy
from tests.ops.cases import EPSILON, round_to

WIDTH = 32


def assert_rounded_once(found, exact, dtype, error=0.0):
    """Allows half a unit in the last place of `exact`, the error of float32, and `error`."""
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    found = numpy(keras.ops.cast(found, "float32")).astype("float64")
    half_unit = EPSILON[dtype] * 2.0 ** np.floor(np.log2(np.abs(exact))) / 2
    assert (np.abs(found - exact) <= half_unit + 2**-19 * np.abs(exact) + error).all()


def inputs(dtype, length=3):
    return round_to(dtype, np.random.default_rng(0).normal(size=(2, length, WIDTH)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("zero_centered", "policy"), [(True, "{}"), (True, "mixed_{}"), (False, "mixed_{}")]
)
def test_rms_norm_rounds_once(zero_centered, policy, dtype):
    """A factor within one rounding of 1 is computed or used in 16 bits."""
    layer = layers.RMSNorm(zero_centered=zero_centered, dtype=policy.format(dtype))
    x = inputs(dtype)
    layer.build(x.shape)
    distance = round_to(dtype, {"bfloat16": 1e-3, "float16": 1e-4}[dtype] * np.ones(WIDTH))
    layer.scale.assign(distance + (0 if zero_centered else 1))
    exact = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + distance)
    assert_rounded_once(layer(x), exact, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_simple_rms_norm_rounds_once(dtype):
    """The mean or the root is computed in 16 bits."""
    x = inputs(dtype)
    exact = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    assert_rounded_once(layers.SimpleRMSNorm(dtype=dtype)(x), exact, dtype)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
@pytest.mark.parametrize("cls", [layers.RGLRU, layers.CGLRU])
def test_scaled_first_input_rounds_once(cls, policy):
    """The multiplier of a first input, or a decay, is computed in 16 bits."""
    layer, x = cls(num_blocks=1, scale_first_input=True, dtype=policy), inputs("bfloat16", 1)
    layer.build(x.shape)
    logit = np.random.default_rng(1).uniform(3, 7, layer.a_logit.shape)
    layer.a_logit.assign(logit)
    # Gates that do not depend on the inputs: 1 and 1/2.
    for gate, bias in ((layer.input_gate, 100.0), (layer.recurrence_gate, 0.0)):
        gate.kernel.assign(np.zeros(gate.kernel.shape))
        gate.bias.assign(np.full(gate.bias.shape, bias))
    multiplier = np.sqrt(-np.expm1(-8 * np.logaddexp(0, -logit)))
    exact = np.tile(multiplier, WIDTH // len(multiplier)) * x
    assert_rounded_once(layer(x), exact, "bfloat16")


def test_hgrn_input_gate_rounds_once():
    """The factor 1 - f of an input is computed in 16 bits."""
    layer = layers.HGRN(dtype="bfloat16")
    layer.build((None, None, WIDTH))
    for projection in (layer.f_proj, layer.o_proj):  # forget gates from the bound, an output of 1/2
        projection.kernel.assign(np.zeros((WIDTH, WIDTH)))
    layer.i_proj.kernel.assign(np.eye(WIDTH))
    # In 16 bits, silu(x) = x for these.
    x = round_to("bfloat16", np.random.default_rng(0).uniform(20, 40, (2, 1, WIDTH)))
    bound = np.random.default_rng(1).uniform(0.1, 0.9, WIDTH)
    log_bounds = np.log([bound, 1 - bound]).astype("float32")
    found = layer(x, lower_bound=keras.ops.convert_to_tensor(log_bounds))
    assert_rounded_once(found, (1 - bound) / 4 * x, "bfloat16")


def test_rotated_keys_round_once():
    """Positions, angles or sines are computed in 16 bits, which represent integers up to 256."""
    layer = layers.LocalAttention(
        1, head_dim=WIDTH, sliding_window=2, partial_rotary_factor=1.0, dtype="bfloat16"
    )
    x = inputs("bfloat16", 1)
    layer.build(x.shape)
    layer.k_proj.kernel.assign(np.eye(WIDTH))
    state = layer.get_initial_state(2)
    state["position"] = keras.ops.convert_to_tensor(np.array([301, 303], "int32"))
    _, state = layer(x, initial_state=state, return_state=True)
    angle = np.array([[301], [303]]) * 10_000.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))
    pairs = x[:, 0, : WIDTH // 2] + 1j * x[:, 0, WIDTH // 2 :]
    turned = pairs * np.exp(1j * angle)
    exact = np.concatenate([turned.real, turned.imag], axis=-1)
    error = 303 * 2**-22 * np.abs(pairs).max()  # of angles in float32
    assert_rounded_once(state["key"][:, 0, 0], exact, "bfloat16", error)


@pytest.mark.parametrize(
    ("policy", "scaled", "expected"),
    [
        ("mixed_float16", False, r"does not scale the loss.*LossScaleOptimizer"),
        ("mixed_float16", True, None),
        ("float16", True, "stores its weights in float16"),
        ("mixed_bfloat16", False, None),
    ],
)
def test_float16_layer_in_a_float32_model_warns_without_loss_scaling(policy, scaled, expected):
    """Weights become NaN without a warning: Keras scales the loss by the policy of the model."""
    layer = layers.RMSNorm(dtype=policy)
    model = keras.Sequential([keras.Input((2, 4)), layer, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
    model.compile(optimizer, "mse", run_eagerly=True)
    x, y = np.ones((1, 2, 4), "float32"), np.ones((1, 2, 1), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.train_on_batch(x, y)
    found = [str(w.message) for w in caught if f"`{layer.name}`" in str(w.message)]
    assert len(found) == (expected is not None)
    assert expected is None or re.search(expected, found[0])


@pytest.mark.parametrize(
    ("rank", "expected"), [(None, [[4096, 4096]]), (1, [[8192], [4096, 4096]])]
)
@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_embedding_of_a_frequent_token_has_an_exact_gradient(policy, rank, expected):
    """Its gradients are summed in bfloat16, where more than 256 equal numbers are lost."""
    layer = ReversibleEmbedding(4, 2, dtype=policy)
    layer.build()
    if rank:
        layer.enable_lora(rank)
    dtypes = [v.value.dtype for v in layer.trainable_variables]

    def loss(weights):
        weights = [keras.ops.cast(w, dtype) for w, dtype in zip(weights, dtypes, strict=True)]
        embeddings = call_with(layer, weights, np.zeros((1, 4096), "int32"))
        return keras.ops.sum(keras.ops.cast(embeddings, "float32"))

    found = gradients(loss, [np.ones(v.shape) for v in layer.trainable_variables])
    for gradient, row in zip(found, expected, strict=True):
        np.testing.assert_array_equal(gradient[0], row)
