"""Weights of decays are excluded from weight decay, in steps and in files."""

import warnings

import keras
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent.layers import CGLRU, HGRN, LRPE, RGLRU, LowerBounds, RMSNorm, StreamingLayer
from tests.layers.table import assert_rejects
from tests.models.tiny import any_family, tiny_causal_lm

pytestmark = pytest.mark.once

exclude = keras_recurrent.exclude_from_weight_decay
OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Lion(0.1, weight_decay=0.5)
    ),
    "muon": lambda: keras.optimizers.Muon(0.1, weight_decay=None, adam_weight_decay=0.5),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Adafactor(0.1, weight_decay=0.5),
            {".*/bias": keras.optimizers.SGD(0.1, weight_decay=0.5)},
        )
    ),
}


def adamw():
    return keras.optimizers.AdamW(0.1, weight_decay=0.5)


def decayed_names(optimizer, variables):
    """Returns names of variables of value 1 that a step with gradients of 0 changes."""
    for variable in variables:
        variable.assign(keras.ops.ones(variable.shape))
    if not optimizer.built:
        optimizer.build(variables)
    gradients = [keras.ops.zeros(variable.shape) for variable in variables]
    if keras.config.backend() == "jax":  # as `fit` does
        slots = [variable.value for variable in optimizer.variables]
        values, _ = optimizer.stateless_apply(slots, gradients, [v.value for v in variables])
    else:
        optimizer.apply(gradients)
        values = [variable.value for variable in variables]
    changed = [np.abs(keras.ops.convert_to_numpy(value) - 1).max() > 1e-3 for value in values]
    return [v.name for v, is_changed in zip(variables, changed, strict=True) if is_changed]


def rg_lru():
    x = keras.Input((None, 4))
    return keras.Model(x, RMSNorm()(RGLRU(num_blocks=2)(x)))


@pytest.mark.every_backend
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decays_keep_their_values_in_a_step_without_gradients(name):
    """Λ decays if an inner optimizer, or one that overrides `_apply_weight_decay`, ignores it."""
    model = rg_lru()
    variables = [v for v in model.trainable_variables if v.name != "scale"]
    assert set(decayed_names(OPTIMIZERS[name](), variables)) == {"a_logit", "bias", "kernel"}
    optimizer = OPTIMIZERS[name]()
    assert [v.name for v in exclude(optimizer, model)] == ["a_logit"]
    assert set(decayed_names(optimizer, variables)) == {"bias", "kernel"}


def test_each_layer_names_its_decays():
    """A layer adds a decay, an angle or a lower bound without `weight_decay=False`."""

    class Custom(StreamingLayer):
        def build(self, input_shape):
            super().build(input_shape)
            self.rate = self.add_state_weight("rate", (2,), "ones", weight_decay=False)

    shapes = {
        CGLRU(num_blocks=1): (1, 2, 4),
        HGRN(): (1, 2, 4),
        LRPE(): (1, 2, 3, 4),
        Custom(): (1, 2, 4),
    }
    shapes[LowerBounds(2)] = (1, 4)
    for layer, shape in shapes.items():
        layer.build(shape)
    found = [sorted(v.name for v in exclude(None, layer)) for layer in shapes]
    assert found == [["a_logit", "theta"], [], ["theta"], ["rate"], ["logits"]]


def test_norms_and_biases_are_excluded_on_request():
    """The bias of block-diagonal gates has two axes, and is treated as a kernel."""
    model = rg_lru()
    excluded = exclude(None, model, norms_and_biases=True)
    assert sorted(v.name for v in excluded) == ["a_logit", "bias", "bias", "scale"]
    model.layers[1].trainable = False
    assert len(exclude(None, model, norms_and_biases=True)) == 4


def test_earlier_exclusions_of_the_user_stay():
    """Keras's `exclude_from_weight_decay` discards earlier exclusions."""
    model = rg_lru()
    kernels = [v for v in model.weights if v.name == "kernel"]
    optimizer = adamw()
    optimizer.exclude_from_weight_decay(kernels[:1], ["scale"])
    exclude(optimizer, model)
    exclude(optimizer, model)
    assert decayed_names(optimizer, model.trainable_variables) == ["bias", "kernel", "bias"]


def test_exclude_rejects_calls_without_effect():
    """A call that cannot work raises no error, such as one after the first step."""
    model, optimizer = rg_lru(), adamw()
    optimizer.build(model.trainable_variables)
    exclude(optimizer, model)
    optimizer.apply([keras.ops.zeros(v.shape) for v in model.trainable_variables])
    by_function = keras.optimizers.MultiOptimizer(lambda variable: optimizer)
    for arguments, message in (
        ((optimizer, model), "has already taken a step.*load it, and call"),
        ((model, adamw()), "is the second argument"),
        (("adamw", model), "must be an optimizer of Keras; got 'adamw'"),
        ((adamw(), RGLRU(num_blocks=2)), "`RGLRU`, is not built"),
        ((by_function, model), r"optimizer.build\(model.trainable_variables\)"),
    ):
        assert_rejects(message, exclude, *arguments)
    assert_rejects("norms_and_biases", exclude, None, model, norms_and_biases="both")


@any_family
def test_compile_warns_once_and_changes_nothing(family):
    """A model trains with weight decay of its decays without a warning."""
    if family in ("lightning_hybrid", "lfm2"):
        pytest.skip("its decays are constants, or it has none")
    model = tiny_causal_lm(family=family)
    for optimizer in (adamw(), "adamw", keras.optimizers.LossScaleOptimizer(adamw())):
        message = r"0\.\d+ for weights .*\(\d in all\).*exclude_from_"
        with pytest.warns(UserWarning, match=message) as found:
            model.compile(optimizer)
        assert len(found) == 1
        assert not exclude_paths(model)
        exclude(model.optimizer, model)  # the check of the optimizer was not a step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.0))
        model.compile("adam")
        exclude(optimizer := adamw(), model)
        model.compile(optimizer)
        # With `mixed_float16`, Keras wraps the optimizer.
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer))


def test_excluded_paths_of_several_optimizers_are_excluded_by_all():
    """A weight that only one optimizer excludes is excluded by all after a file is loaded."""
    model, optimizer = tiny_causal_lm(family="hgrn2", num_layers=1), OPTIMIZERS["several"]()
    optimizer.build(model.trainable_variables)
    first, *others = optimizer.optimizers
    for inner, names in [(first, ["scale", "bias"]), *((one, ["bias"]) for one in others)]:
        inner.exclude_from_weight_decay(var_names=names)
    model.compile(optimizer)
    assert exclude_paths(model) == [v.path for v in model.weights if "bias" in v.path]


def exclude_paths(model):
    return model.get_compile_config()["config"]["excluded_from_weight_decay"]


def test_keras_file_keeps_exclusions(tmp_path):
    """Keras saves no exclusions: a loaded model decays the weights that were excluded."""
    model = tiny_causal_lm(family="hgrn2", num_layers=2)
    optimizer = adamw()
    optimizer.exclude_from_weight_decay(var_names=["embeddings"])
    excluded = {v.path for v in exclude(optimizer, model)}
    model.compile(optimizer)
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert exclude_paths(again) == exclude_paths(model) != []
    variables = again.trainable_variables
    decayed = decayed_names(again.optimizer, variables)
    names = {v.name for v in variables if v.path in excluded}
    assert names
    assert not {*names, "embeddings"} & set(decayed)
    assert len(decayed) >= len(variables) - len(exclude_paths(again))
