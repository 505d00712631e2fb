"""The portable implementations, which exporters use, against the definitions: forward only."""

import keras
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent import dispatch
from keras_recurrent.layers import RGLRU, RecurrentBlock
from tests.ops import cases, native, token_wise
from tests.ops.cases import align, nest
from tests.ops.judge import errors, reference

# The code is the same on all backends; tests of exports run it on each.
pytestmark = pytest.mark.once

EXPORTED = sorted(
    name for name in dispatch.IMPLEMENTATIONS if not isinstance(dispatch.portable_kernel(name), str)
)
CASES = {
    name: cases.CASES[name]
    for name in (
        *("one token, state", "one document", "prime sizes", "decays near one"),
        *("decays near zero", "bfloat16"),
    )
}
CASES["two blocks of chunks"] = cases.Case(1, 700, 2, kinds=True, state=True)
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.0 / 64}


def run(operation, drawn):
    """{name: float64 array} of the results."""
    absent = {name: None for name, value in drawn.arguments.items() if value is None}
    arguments = {**absent, **nest(native.tensors(drawn)), **drawn.options}
    results = dispatch.run(operation, arguments, dispatch.PORTABLE)
    results = cases.flatten(drawn.name_results(results))
    assert native.dtype(results["output"]) == drawn.dtype_of("output")
    return {name: native.to_numpy(result) for name, result in results.items()}


def test_all_operations_of_a_forward_pass_are_portable():
    """A model cannot be exported because an operation has no portable implementation."""
    training = {"linear_crossentropy", "token_crossentropy"}
    assert sorted(dispatch.IMPLEMENTATIONS.keys() - training) == EXPORTED
    with pytest.raises(NotImplementedError, match=r"no keras_recurrent/portable/token_cross"):
        dispatch.run("token_crossentropy", {}, dispatch.PORTABLE)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("operation", [name for name in EXPORTED if name in cases.DRAW])
def test_portable_operation_over_time_matches_definition(operation, case):
    """An exported model computes something else, or NaN at padding reaches a result."""
    drawn = cases.draw(operation, case)
    truth = reference(operation, drawn, "float64")
    if drawn.padding is not None:
        for name, t in drawn.tensors.items():
            if np.ndim(t) > 2:
                drawn.tensors[name] = np.where(align(drawn.padding, t), np.nan, t)
    results = run(operation, drawn)
    assert all(np.isfinite(result).all() for result in results.values())
    truth = {name: truth[name] for name in results}
    for name, error in errors(drawn, truth, results).items():
        largest = max(1.0, np.abs(truth[name]).max(initial=0))
        assert error <= TOLERANCE[case.dtype] * largest, name


@pytest.mark.parametrize("operation", ["linear_scan", "complex_linear_scan", "rg_lru"])
def test_nan_at_padding_reaches_no_gradient(operation):
    """A model that is trained with portable operations gets NaN from padding."""
    drawn = cases.draw(operation, cases.Case(2, 19, 4, kinds=True))
    tensors = {
        name: np.where(align(drawn.padding, t), np.nan, t) if np.ndim(t) > 2 else t
        for name, t in drawn.tensors.items()
    }

    def kernel(**arguments):
        return dispatch.run(operation, arguments, dispatch.PORTABLE)

    results = native.run(kernel, drawn._replace(tensors=tensors), compiled=False)
    for name, result in results.items():
        if name.startswith("gradient"):
            assert np.isfinite(result).all(), name


@pytest.mark.parametrize("case", token_wise.CASES.values(), ids=token_wise.CASES)
@pytest.mark.parametrize("operation", [name for name in EXPORTED if name in token_wise.DRAW])
def test_portable_operation_on_tokens_matches_definition(operation, case):
    """An exported model computes something else."""
    if "float64" in (case.dtype, case.parameter_dtype):
        pytest.skip("exported models are float32")
    drawn = token_wise.draw(operation, case)
    truth = reference(operation, drawn, "float64")["output"]
    tolerance = max(2 * cases.EPSILON[drawn.dtype_of("output")], 2e-6)
    np.testing.assert_allclose(run(operation, drawn)["output"], truth, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("outputs", [{"return_sequences": False}, {"zero_output_for_mask": False}])
def test_portable_layer_of_padded_sequence_equals_that_of_the_backend(outputs):
    """An exported layer returns another last output, or another output at padding."""
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(4, 20, 6)).astype("float32"), rng.random((4, 20)) < 0.6
    mask[0], mask[1, :3], mask[2, -3:] = False, False, False
    for layer in RGLRU(num_blocks=2, **outputs), RecurrentBlock(8, **outputs):
        expected = layer(x, mask=mask)
        with keras_recurrent.implementation("portable"):
            exported = layer(x, mask=mask)
        exported, expected = (native.to_numpy(y) for y in (exported, expected))
        np.testing.assert_allclose(exported, expected, rtol=1e-5, atol=1e-6)


def test_portable_implementation_runs_only_if_named():
    """The name `portable` is not accepted, or the slow portable code runs by default."""
    x = keras.ops.ones((1, 3, 2), "float32")
    with keras_recurrent.implementation("portable"):
        choice = keras_recurrent.which_implementation("linear_scan", x, -x)
        assert str(choice) == "`linear_scan` on " + dispatch.BACKEND + (
            ": keras_recurrent/portable/linear_scan.py runs"
        )
    assert keras_recurrent.which_implementation("linear_scan", x, -x).implementation != "portable"
