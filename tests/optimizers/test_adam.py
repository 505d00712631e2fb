"""Adam and AdamW, judged against NumPy in float64 and against Keras's optimizers."""

import warnings

import keras
import numpy as np
import pytest

from keras_recurrent import exclude_from_weight_decay
from keras_recurrent.models import GriffinCausalLM
from keras_recurrent.optimizers import Adam, AdamW
from keras_recurrent.optimizers.stochastic_rounding import rounding_keys, stochastic_round
from tests.devices.processes import run_on_simulated_devices
from tests.gpu import has_gpu
from tests.models.tiny import NIGHTLY_IF_COMPILED

DTYPES = ["bfloat16", pytest.param("float16", marks=NIGHTLY_IF_COMPILED)]
SHAPES = (30, 40), (5,), (2, 1, 3)
LEARNING_RATE = 0.02
# On NVIDIA GPUs, torch's fused kernel has 1 - β₂ in float32, with an error of 1.3e-5.
GPU_ERROR = 2e-5 if has_gpu() and keras.config.backend() == "torch" else 0
BACKEND = keras.config.backend()
if BACKEND == "torch":
    import torch
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.01},
    "clipnorm": {"clipnorm": 0.5},
    "global_clipnorm": {"global_clipnorm": 0.7, "weight_decay": 0.1},
    "clipvalue": {"clipvalue": 0.1},
    "accumulation": {"gradient_accumulation_steps": 2, "weight_decay": 0.1},
    "average": {"use_ema": True, "ema_momentum": 0.999},
    "overwriting average": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    "schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)},
    "scaled": {"loss_scale_factor": 4.0},
}


def make_variables(dtype="float32"):
    generator = np.random.default_rng(0)
    values = [generator.normal(size=shape) for shape in SHAPES]
    return [keras.Variable(v, dtype=dtype, name=f"v{i}") for i, v in enumerate(values)]


def make_gradients(step, dtype="float32"):
    """Returns gradients from near ε to such that their squares overflow in float16."""
    generator = np.random.default_rng(step)
    values = [generator.normal(size=shape) * 1e-7 * 1e5**i for i, shape in enumerate(SHAPES)]
    return [keras.ops.convert_to_tensor(g, dtype) for g in values]


def make_optimizer(cls, variables, num_excluded=1, **options):
    optimizer = cls(**{"learning_rate": LEARNING_RATE, **options})
    optimizer.exclude_from_weight_decay(var_list=variables[:num_excluded])
    optimizer.build(variables)
    return optimizer


def apply(optimizer, gradients, variables):
    """Applies gradients that the variables own on torch, as in `fit`."""
    if BACKEND == "torch":
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.value.grad = gradient
    optimizer.apply(gradients, variables)


def train(
    cls, dtype, num_steps, first=0, variables=None, slots=None, rounded_to="float32", **options
):
    """Returns variables and the optimizer after some steps, which begin with given values."""
    variables = variables or make_variables(dtype)
    optimizer = make_optimizer(cls, variables, **options)
    if slots is not None:
        optimizer.set_weights(slots)
    for step in range(first, first + num_steps):
        gradients = [keras.ops.cast(g, dtype) for g in make_gradients(step, rounded_to)]
        apply(optimizer, gradients, variables)
    return variables, optimizer


def numpy(tensors):
    return [keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")) for x in tensors]


def max_error(found, expected):
    """Returns the largest difference of arrays, in relation to the largest number of an array."""
    pairs = zip(found, expected, strict=True)
    return max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in pairs)


def numpy_adamw(values, steps, learning_rate, weight_decay):
    """Returns weights after AdamW in float64."""
    values = [np.array(v, "float64") for v in values]
    m, v = [np.zeros_like(x) for x in values], [np.zeros_like(x) for x in values]
    for t, gradients in enumerate(steps, 1):
        for i, g in enumerate(numpy(gradients)):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * np.square(g, dtype="float64")
            values[i] *= 1 - learning_rate * weight_decay
            scale = learning_rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            values[i] -= scale * m[i] / (np.sqrt(v[i]) + 1e-7)
    return values


@pytest.mark.parametrize(
    ("name", "case"), [("Adam", "plain"), ("Adam", "decay"), *(("AdamW", case) for case in OPTIONS)]
)
def test_adam_in_float32_continues_runs_of_keras_and_back(name, case):
    """The optimizer changes results of float32 weights, or its slots differ from Keras's."""
    ours, theirs = {"Adam": Adam, "AdamW": AdamW}[name], getattr(keras.optimizers, name)
    runs, options = [], OPTIONS[case]
    for classes in ((theirs, theirs, theirs), (theirs, ours, theirs), (ours, ours, ours)):
        variables = slots = None
        for i, cls in enumerate(classes):
            variables, optimizer = train(cls, "float32", 2, 2 * i, variables, slots, **options)
            slots = numpy(optimizer.variables)
        runs.append(numpy(variables) + slots)
    # In float32, Keras's 1 - β₂ has an error of 5e-5, and so the first step, about 0.02.
    assert max_error(runs[1], runs[0]) < max(2e-6, GPU_ERROR)
    assert max_error(runs[2], runs[0]) < max(2e-6, GPU_ERROR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_adamw_in_16_bits_takes_the_steps_of_float32(dtype, options):
    """Clipping, accumulation, averages or slots of 16-bit weights are computed in 16 bits."""
    num_steps = 4
    options = {"rounded_to": dtype, **options}
    variables, optimizer = train(AdamW, dtype, num_steps, **options)
    expected, reference = train(AdamW, "float32", num_steps, **options)
    slots = optimizer.variables
    assert [v.dtype for v in slots] == [v.dtype for v in reference.variables]
    is_average = ["average" in v.path for v in slots]
    pairs = list(zip(numpy(slots), numpy(reference.variables), is_average, strict=True))
    error = max_error(*zip(*(pair[:2] for pair in pairs if not pair[2]), strict=True))
    assert error < max(1e-5, GPU_ERROR)
    found = numpy(variables) + [pair[0] for pair in pairs if pair[2]]
    weights = numpy(expected) + [pair[1] for pair in pairs if pair[2]]
    # Each rounding has an error of at most one unit in the last place; errors add like a random
    # walk. The gradient of the last variable moves it by about the learning rate a step.
    unit = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    assert max_error(found, weights) < 2 * unit * np.sqrt(num_steps)
    steps = num_steps // options.get("gradient_accumulation_steps", 1)
    start = numpy(make_variables())[2]
    if "schedule" not in str(options.get("learning_rate")):
        assert np.abs(numpy(variables)[2] - start).max() > 0.2 * LEARNING_RATE * steps


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_round_returns_neighbors_with_the_right_mean(dtype):
    """Rounding to 16 bits is biased, or gives a number that is not a neighbor."""
    numbers = [1.001, -3.3, 1e-3, -7.77e-5, 3e-6, -4e-8, 1e-9, 0.0, 1.0, -65.03, 1000.1]
    x = np.repeat(np.array(numbers, "float32")[:, None], 20_000, axis=1)
    rounded = round_float32(x, dtype, 1)
    for number, results in zip(x[:, 0].astype("float64"), rounded, strict=True):
        neighbors = np.unique(results)
        assert len(neighbors) <= 2
        if len(neighbors) == 1:
            assert neighbors[0] == number
            continue
        low, high = neighbors
        assert low < number < high
        exact = keras.ops.convert_to_tensor([low, (low + high) / 2, high], dtype)
        assert len(np.unique(numpy([exact])[0])) == 2  # no number of the dtype is between them
        chance = (number - low) / (high - low)
        deviation = np.sqrt(chance * (1 - chance) / results.size)
        assert abs((results == high).mean() - chance) < 5 * deviation


def round_float32(x, dtype, step, index=0):
    key = rounding_keys(keras.ops.convert_to_tensor(step, "int32"), index)
    return numpy([stochastic_round(keras.ops.convert_to_tensor(x), dtype, key)])[0]


def test_stochastic_round_is_independent_of_step_weight_and_position():
    """Errors of one element add up over steps, or are equal in several elements or weights."""
    x = np.full((20, 50), 1 + 2.0**-8, "float32")  # in the middle of two numbers
    up = np.array(
        [[round_float32(x, "bfloat16", step, index) for index in range(3)] for step in range(40)]
    )
    up = np.where(up > 1, 1.0, -1.0)  # [steps, weights, 20, 50]
    for axis in range(4):
        products = up * np.roll(up, 1, axis)
        assert abs(products.mean()) < 5 / np.sqrt(up.size), axis
        sums = up.sum(axis)
        assert abs(np.square(sums).mean() / up.shape[axis] - 1) < 5 * np.sqrt(2 / sums.size), axis


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_round_keeps_infinity_and_nan(dtype):
    """Weights that have overflowed become numbers."""
    x = np.array([np.inf, -np.inf, np.nan, 1e38], "float32")
    found = round_float32(x, dtype, 1)
    np.testing.assert_array_equal(found[:3], [np.inf, -np.inf, np.nan])
    assert (found[3] == np.inf) == (dtype == "float16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_in_16_bits_follows_float64(dtype):
    """Small updates or the decay of 16-bit weights are rounded away."""
    unit = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    num_steps, rate, decay = 50, 0.4 * unit, 0.5  # rounding to nearest keeps most weights
    variables = make_variables(dtype)
    values = numpy(variables)
    steps = [make_gradients(t % 7, dtype) for t in range(num_steps)]
    options = {"learning_rate": rate, "weight_decay": decay}
    optimizer = make_optimizer(AdamW, variables, num_excluded=0, **options)
    for gradients in steps:
        apply(optimizer, gradients, variables)
    expected = numpy_adamw(values, steps, rate, decay)
    errors = np.ravel(numpy(variables)[0] - expected[0])
    # Rounding errors are at most one unit in the last place, and independent.
    largest = np.abs(values[0]).max()
    assert np.abs(errors).max() < 3 * unit * largest * np.sqrt(num_steps)
    undecayed = numpy_adamw(values, steps, rate, 0.0)
    for change in (undecayed[0] - values[0], expected[0] - undecayed[0]):
        missing = (errors * np.sign(np.ravel(change))).mean() / np.abs(change).mean()
        assert abs(missing) < 0.05


@pytest.mark.skipif(BACKEND != "torch", reason="the kernels of torch")
def test_adamw_updates_weights_without_a_kernel_that_do_not_decay():
    """On torch, an error is raised if all weights that are updated one by one are excluded."""
    found, expected = (
        train(cls, "float64", 2, weight_decay=0.1)[0] for cls in (AdamW, keras.optimizers.AdamW)
    )
    assert max_error(numpy(found), numpy(expected)) < 1e-6


@pytest.mark.skipif(BACKEND != "torch", reason="programs of other backends run on the device")
@pytest.mark.parametrize(
    "case", ["plain", "clipnorm", "global_clipnorm", "clipvalue", "average", "schedule"]
)
def test_step_on_torch_does_not_wait_for_the_device(case, monkeypatch):
    """A step copies a number to the GPU or from it, which takes longer than many updates."""
    variables, gradients = make_variables(), make_gradients(0)
    optimizer = make_optimizer(AdamW, variables, **OPTIONS[case])
    apply(optimizer, gradients, variables)  # reads the number of the step
    if has_gpu():
        try:
            with warnings.catch_warnings(action="ignore"):  # the mode is called a prototype
                torch.cuda.set_sync_debug_mode("error")
            apply(optimizer, gradients, variables)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    elif case != "schedule":  # which is computed on the CPU
        monkeypatch.delattr(torch, "as_tensor")  # with which Keras copies numbers to the device
        for name in ("__bool__", "__float__", "__int__", "item"):
            monkeypatch.setattr(torch.Tensor, name, None)
        apply(optimizer, gradients, variables)


def dense_model(optimizer):
    """Returns a model in bfloat16 that TensorFlow traces in less time than a language model."""
    keras.utils.set_random_seed(0)
    layers = (keras.layers.Dense(units, dtype="bfloat16") for units in (16, 1))
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize("preset", [pytest.param("hawk_tiny", marks=NIGHTLY_IF_COMPILED)])
def test_fit_in_bfloat16_moves_all_weights_and_lowers_the_loss(preset):
    """A language model stored in bfloat16 does not train with the optimizer."""
    keras.utils.set_random_seed(0)
    options = {"num_layers": 1, "dtype": "bfloat16", "sequence_length": 16}
    model = GriffinCausalLM.from_preset(preset, **options)
    optimizer = AdamW(3e-3, weight_decay=0.1)
    exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer, model.loss)
    before = numpy(model.trainable_variables)
    history = model.fit(["tick tock ", "tock tick"] * 4, epochs=8, batch_size=4, verbose=0)
    assert history.history["loss"][-1] < 0.9 * history.history["loss"][0]
    after = numpy(model.trainable_variables)
    for old, new, variable in zip(before, after, model.trainable_variables, strict=True):
        assert np.any(old != new), variable.path


def test_fit_that_is_saved_and_loaded_continues_bit_identically(tmp_path):
    """Slots or random numbers of 16-bit weights are not those of a run without a stop."""
    x, results = np.random.default_rng(0).normal(size=(8, 8)), []
    for is_saved in (False, True):
        model = dense_model(AdamW(3e-3, weight_decay=0.1))
        for part in range(2):
            if is_saved and part:
                model.save(tmp_path / "model.keras")
                model = keras.saving.load_model(tmp_path / "model.keras")
                assert type(model.optimizer) is AdamW
            model.fit(x, x[:, :1], epochs=2, batch_size=4, shuffle=False, verbose=0)
        results.append(numpy(model.trainable_variables))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_adam_after_its_step_was_assigned_uses_the_new_step():
    """On torch, the number of steps on the host is that before `iterations` was assigned."""
    start, before = train(Adam, "float32", 1)
    start, slots = numpy(start), numpy(before.variables)
    variables, optimizer = train(Adam, "float32", 3)
    optimizer.set_weights(slots)
    for variable, value in zip(variables, start, strict=True):
        variable.assign(value)
    gradients = make_gradients(7)
    optimizer.apply(gradients, variables)
    for variable, value in zip(expected := make_variables(), start, strict=True):
        variable.assign(value)
    fresh = make_optimizer(Adam, expected)
    fresh.set_weights(slots)
    fresh.apply(gradients, expected)
    for found, value in zip(numpy(variables), numpy(expected), strict=True):
        np.testing.assert_array_equal(found, value)


def test_global_clipnorm_leaves_gradients_of_the_caller_unchanged():
    """The update divides gradients in place that do not belong to the variables."""
    variables, gradients = make_variables(), make_gradients(0)
    optimizer = make_optimizer(AdamW, variables, global_clipnorm=0.1)
    optimizer.apply(gradients, variables)
    for found, expected in zip(numpy(gradients), numpy(make_gradients(0)), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_global_clipnorm_with_a_gradient_that_is_not_finite_spreads_nan(value):
    """Weights drift after a gradient has overflowed, where Keras's become NaN."""
    variables, gradients = make_variables(), make_gradients(0)
    gradients[1] = gradients[1] * value
    apply(make_optimizer(AdamW, variables, global_clipnorm=0.1), gradients, variables)
    assert np.isnan(numpy(variables)[0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_adam_loads_slots_of_keras_in_16_bits_and_back(dtype):
    """A run with Keras's optimizer of 16-bit weights cannot continue."""
    variables, before = train(keras.optimizers.AdamW, dtype, 3, beta_2=0.9)
    store: dict = {}
    before.save_own_variables(store)
    optimizer = make_optimizer(AdamW, variables)
    optimizer.load_own_variables(store)
    for found, expected in zip(numpy(optimizer.variables), numpy(before.variables), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert {v.dtype for v in optimizer._momentums} == {"float32"}
    optimizer.save_own_variables(store)
    before.load_own_variables(store)
    assert {v.dtype for v in before._momentums} == {dtype}


def test_weights_file_of_keras_optimizer_in_16_bits_continues(tmp_path):
    """`load_weights` does not convert the slots of Keras's optimizer."""
    path = tmp_path / "model.weights.h5"
    model = dense_model(keras.optimizers.AdamW(3e-3, beta_2=0.99))
    model.fit(np.ones((2, 8)), np.ones((2, 1)), verbose=0)
    model.save_weights(path)
    expected = numpy(model.optimizer.variables)
    model = dense_model(AdamW(3e-3))
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    for found, value in zip(numpy(model.optimizer.variables), expected, strict=True):
        np.testing.assert_array_equal(found, value)


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND != "jax", reason="Keras splits weights over devices on JAX alone")
def test_adamw_in_16_bits_on_two_devices_matches_one():
    """Random numbers of the elements of a weight depend on how it is split."""
    run_on_simulated_devices(2, "jax_optimizer")
