"""The loss from hidden states, `linear_crossentropy`, judged by its definition.

`judge` defines the bound on errors, `losses` has the inputs.
"""

import importlib

import keras
import numpy as np
import pytest

from keras_recurrent import ops
from keras_recurrent.backends.reference import linear_crossentropy as reference
from tests.devices.processes import run_on_simulated_devices
from tests.ops import judge
from tests.ops.cases import unit
from tests.ops.losses import CASES, Case, draw

OPERATION = "linear_crossentropy"
BACKEND = keras.config.backend()
PLAIN = importlib.import_module(f"keras_recurrent.backends.{BACKEND}.linear_crossentropy")
every_implementation = judge.every_implementation(OPERATION)
every_reduction = pytest.mark.parametrize("reduction", ["sum", None])


def check(case, reduction, implementation):
    drawn = draw(case._replace(reduction=reduction))
    results = judge.run(OPERATION, implementation, drawn)
    arguments = {**drawn.arguments, "soft_cap": case.soft_cap, "reduction": None}
    losses, best = reference.linear_crossentropy(**arguments)
    np.testing.assert_array_equal(results["best"], best)
    # The rounding of a sum is relative to its terms, whose signs differ, not to the sum.
    loss = np.sum(losses) if reduction == "sum" else losses
    unit_of_loss = unit(drawn.dtype_of("output"), np.abs(loss).max(initial=0))
    extra = {"output": 2 * (unit("float32", np.abs(losses).sum()) - unit_of_loss)}
    judge.compare(OPERATION, implementation, drawn, results, judge.NEIGHBORS, extra=extra)


@every_implementation
@pytest.mark.parametrize(
    ("case", "reduction"),
    [
        pytest.param(case, reduction, id=f"{name}-{reduction}")
        for i, (name, case) in enumerate(CASES.items())
        for reduction in [("sum", None)[i % 2]]
    ],
)
def test_loss_and_gradients_match_definition(case, reduction, implementation):
    """The loss, a gradient, or the best tokens are wrong."""
    check(case, reduction, implementation)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 8 tokens; torch computes the logits of 3 tokens at once."""
    if BACKEND == "torch":
        monkeypatch.setattr(PLAIN, "GRADIENTS", 8 * 31)
        monkeypatch.setattr(PLAIN, "LOGITS", 3 * 31)
    else:
        monkeypatch.setattr(PLAIN, "CROSSENTROPY_CHUNK", 8)


@every_implementation
@pytest.mark.parametrize(
    ("shape", "reduction"), [((23,), "sum"), ((3, 17), None), ((2, 3, 5), "sum"), ((16,), None)]
)
def test_loss_of_several_chunks_matches_definition(small_chunks, shape, reduction, implementation):
    """Tokens of a later or incomplete chunk are wrong. No other test has these shapes."""
    check(Case(shape, 6, 31, soft_cap=5.0), reduction, implementation)


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND != "jax", reason="Keras splits operations over devices on JAX alone")
def test_loss_on_eight_devices_equals_one_device():
    """Batch rows, tokens or the vocabulary are split over devices wrongly."""
    run_on_simulated_devices(8, "jax_shards", OPERATION)


@every_implementation
@every_reduction
def test_token_outside_the_vocabulary_gives_nan_unless_its_weight_is_zero(
    reduction, implementation
):
    """An invalid label gives a number, or one with weight 0 changes the loss."""
    drawn = draw(Case((4,), weighted=False, reduction=reduction))
    drawn.tensors["tokens"][:] = 1, -1, 11, 2
    drawn.d_output[...] = 1
    results = judge.run(OPERATION, implementation, drawn)
    is_invalid = [False, True, True, False]
    np.testing.assert_array_equal(np.isnan(results["gradient of x"]).all(-1), is_invalid)
    np.testing.assert_array_equal(np.isnan(results["output"]), True if reduction else is_invalid)
    weighted = drawn._replace(
        tensors=drawn.tensors | {"sample_weight": np.array([1.0, 0, 0, 1])},
        dtypes=drawn.dtypes | {"sample_weight": "float32"},
    )
    results = judge.run(OPERATION, implementation, weighted)
    assert all(np.isfinite(r).all() for r in results.values())
    assert not results["gradient of x"][1:3].any()


def test_loss_in_a_functional_model_equals_eager_loss():
    """A symbolic loss has wrong shapes or dtypes, or the model computes another one."""
    x, tokens = keras.Input((None, 5)), keras.Input((None,), dtype="int32")
    embedding = np.random.default_rng(0).normal(size=(11, 5)).astype("float32")
    loss, best = ops.linear_crossentropy(x, embedding, tokens, reduction=None)
    assert (loss.shape, best.shape, best.dtype) == ((None, None), (None, None), "int32")
    model = keras.Model([x, tokens], [loss, best])
    x, tokens = np.ones((2, 3, 5), "float32"), np.ones((2, 3), "int32")
    results = model.predict([x, tokens], verbose=0)
    expected = ops.linear_crossentropy(x, embedding, tokens, reduction=None)
    for result, array in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, keras.ops.convert_to_numpy(array), rtol=1e-6)
