"""Training of weights stored in 16 bits, some of which optimizers of Keras do not update."""

import functools

import keras
import numpy as np
import pytest
from keras import optimizers

from tests.layers.table import assert_rejects
from tests.models.tiny import NIGHTLY_IF_COMPILED, tiny_backbone, tiny_causal_lm, training_batch

OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "RMSprop": lambda: optimizers.RMSprop(1e-2),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(10.0),
    "Adafactor": lambda: optimizers.Adafactor(1e-2),
    "Adam": lambda: optimizers.Adam(1e-2),
    "Adam, 0.99": lambda: optimizers.Adam(1e-2, beta_2=0.99),
    "Adam, 0.999, 0.99": lambda: optimizers.Adam(1e-2, beta_1=0.999, beta_2=0.99),
    "AdamW": lambda: optimizers.AdamW(1e-2, weight_decay=0.0),
    "Adamax": lambda: optimizers.Adamax(1e-2),
    "Adamax, 0.999": lambda: optimizers.Adamax(1e-2, beta_1=0.999),
    "Nadam": lambda: optimizers.Nadam(1e-2),
    "Lion": lambda: optimizers.Lion(1e-2),
    "Lamb": lambda: optimizers.Lamb(1e-2),
    "Ftrl": lambda: optimizers.Ftrl(1e-2),
    "Muon": lambda: optimizers.Muon(1e-2),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(1e-2),
    "several": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.SGD(0.1), {".*scale": optimizers.Adam(1e-2)})
    ),
}
FAILING = {
    "bfloat16": {
        *("Adam", "Adam, 0.999, 0.99", "AdamW", "Adamax, 0.999", "Nadam", "Lamb", "Muon"),
        *("ScheduleFreeAdamW", "several"),
    }
}
FAILING["float16"] = {*FAILING["bfloat16"], "Adam, 0.99", "Adamax", "Adafactor"}
REMEDY = 'dtype policy "mixed_bfloat16"'


@functools.cache
def one_block(dtype):
    return tiny_causal_lm(num_layers=1, block_types=("recurrent",), dtype=dtype)


def value(variable):
    return np.array(keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32")))


@pytest.mark.parametrize("name", [pytest.param(n, marks=NIGHTLY_IF_COMPILED) for n in OPTIMIZERS])
def test_update_of_bfloat16_weight_moves_it_unless_listed_as_failing(name):
    """The check of `compile` has a wrong list of optimizers that fail in bfloat16."""
    variable = keras.Variable(np.ones(8), dtype="bfloat16", name="scale")
    optimizer, rng = OPTIMIZERS[name](), np.random.default_rng(0)
    optimizer.build([variable])
    error = ""
    try:
        for _ in range(10):
            gradient = keras.ops.convert_to_tensor(rng.normal(0.1, 0.1, 8), "bfloat16")
            optimizer.apply([gradient], [variable])
    except TypeError as raised:  # Nadam on torch
        error = str(raised)
    is_moved = not error and np.isfinite(value(variable)).all() and (value(variable) != 1).any()
    assert is_moved == (name not in FAILING["bfloat16"]), (value(variable), error)


@pytest.mark.once
@pytest.mark.parametrize("dtype", FAILING)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compile_for_16_bit_weights_raises_or_warns(name, dtype):
    """`fit` runs with an optimizer that moves no weight, or loses updates silently."""
    model = one_block(dtype)
    if name in FAILING[dtype]:
        with pytest.raises(ValueError, match=rf"cannot train weights in {dtype}.*{REMEDY}"):
            model.compile(OPTIMIZERS[name]())
    else:
        with pytest.warns(UserWarning, match=rf"rounds away .* weights in {dtype}.*{REMEDY}"):
            model.compile(OPTIMIZERS[name]())


@pytest.mark.parametrize("kind", ["language model", "backbone"])
def test_fit_with_adam_that_compile_does_not_check_raises(kind):
    """`fit` of a backbone, or of a model that its constructor compiled, changes no weight."""
    x, y = training_batch(2, 6)
    if kind == "backbone":
        model, y = tiny_backbone(dtype="bfloat16"), np.zeros((2, 6, 16))
        model.compile("adam", "mse")
    else:
        model = one_block("bfloat16")
        model.compile()  # as the constructor: the model may only generate
    for train in (model.fit, model.train_on_batch):
        assert_rejects(REMEDY, train, x, y)


def test_keras_file_with_bfloat16_weights_loads_with_its_optimizer(tmp_path):
    """A model saved with its automatic Adam cannot be loaded to generate."""
    model = tiny_causal_lm(num_layers=1, block_types=("recurrent",), dtype="bfloat16")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)
    assert_rejects(REMEDY, loaded.fit, *training_batch(2, 6))


class CustomAdam(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        raise NotImplementedError


def test_compile_with_float32_and_frozen_16_bit_weights_does_not_warn():
    """The check rejects LoRA, or optimizers that update no 16-bit weight by code of Keras."""
    model = tiny_causal_lm(num_layers=1, block_types=("recurrent",), dtype="bfloat16")
    model.compile(CustomAdam())
    adam, custom = optimizers.Adam(), CustomAdam()
    model.compile(optimizers.MultiOptimizer(lambda v: custom if v.dtype == "bfloat16" else adam))
    model.compile(None)
    model.backbone.enable_lora(2)
    model.compile(optimizers.AdamW())
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
