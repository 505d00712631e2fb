"""What exporters take, against the definitions: outputs and final states."""

import keras
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent import dispatch
from keras_recurrent.layers import RGLRU, RecurrentBlock
from keras_recurrent.layers.tokens import token_position
from tests.ops import cases, native, token_wise
from tests.ops.judge import reference

# It is one text for all backends; that it serves on each is shown by the tests of exports.
pytestmark = pytest.mark.once

EXPORTED = sorted(
    name for name in dispatch.IMPLEMENTATIONS if not isinstance(dispatch.portable_kernel(name), str)
)
SOME = ("one token, state", "one document a row", "prime sizes", "near one", "all but forgotten")
LONG = {"two blocks of chunks": cases.Case(1, 700, 2, kinds=True, state=True)}
CASES = {name: cases.CASES[name] for name in (*SOME, "bfloat16")} | LONG
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.0 / 64}


def tensor(array, dtype):
    return None if array is None else keras.ops.convert_to_tensor(np.asarray(array), dtype)


def portable(operation, arguments):
    return dispatch.run(operation, arguments, dispatch.PORTABLE)


def test_all_operations_of_a_forward_pass_are_there():
    training = {"linear_crossentropy", "token_crossentropy"}
    assert sorted(dispatch.IMPLEMENTATIONS.keys() - training) == EXPORTED
    with pytest.raises(NotImplementedError, match=r"no keras_recurrent/portable/token_cross"):
        portable("token_crossentropy", {})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("operation", [name for name in EXPORTED if name in cases.DRAW])
def test_an_operation_over_time(operation, case):
    drawn = cases.draw(operation, case)
    over_time = [n for n, t in drawn.tensors.items() if t is not None and np.ndim(t) > 2]
    tensors = dict(drawn.tensors)
    if drawn.token_kind is not None:  # anything may stand at padding
        for name in over_time:
            padding = cases.beside(tensors[name], drawn.token_kind) == 2
            tensors[name] = np.where(padding, np.nan, tensors[name])
    given = {name: tensor(t, drawn.dtypes.get(name)) for name, t in tensors.items()}
    state = {
        name: tensor(t, drawn.dtypes.get(name, "int32"))
        for name, t in cases.named("state", drawn.initial_state).items()
    }
    given["initial_state"] = cases.unnamed("state", state) if state else None
    given["token_kind"] = tensor(drawn.token_kind, "int8")
    output, final = portable(operation, {**given, **drawn.options})
    expected = reference(operation, drawn, "float64")
    results = {"output": output} | cases.named("final_state", final)
    assert keras.backend.standardize_dtype(output.dtype) == drawn.dtypes[drawn.output]
    for name, result in results.items():
        result, wanted = native.to_numpy(result), expected[name]
        assert np.isfinite(result).all(), name
        difference = np.abs(result - wanted)
        if name == "output" and drawn.token_kind is not None:
            padding = cases.beside(difference, drawn.token_kind) == 2
            difference = np.where(padding, 0, difference)
        largest = max(1.0, np.abs(wanted).max(initial=0))
        assert difference.max(initial=0) <= TOLERANCE[case.dtype] * largest, name


@pytest.mark.parametrize("case", token_wise.CASES.values(), ids=token_wise.CASES)
@pytest.mark.parametrize("operation", [name for name in EXPORTED if name in token_wise.DRAW])
def test_an_operation_on_each_token(operation, case):
    if "float64" in (case.dtype, case.parameter_dtype):
        pytest.skip("exported models are of float32")
    drawn = token_wise.draw(operation, case)
    given = {name: tensor(t, drawn.dtypes.get(name)) for name, t in drawn.tensors.items()}
    output = portable(operation, {**given, **drawn.options})
    wanted = reference(operation, drawn, "float64")["output"]
    assert keras.backend.standardize_dtype(output.dtype) == drawn.output_dtype
    rounding = 2 * cases.EPSILON[drawn.output_dtype]
    np.testing.assert_allclose(native.to_numpy(output), wanted, rtol=max(rounding, 2e-6), atol=1e-7)


def test_positions():
    rng = np.random.default_rng(0)
    kind = rng.choice([0, 1, 2], p=[0.7, 0.1, 0.2], size=(3, 90)).astype("int8")
    first, x = np.array([0, 4, 9], "int32"), np.zeros((3, 90, 1), "float32")
    with keras_recurrent.implementation("portable"):
        exported = token_position(x, tensor(kind, "int8"), first)
    expected = token_position(x, tensor(kind, "int8"), first)
    np.testing.assert_array_equal(native.to_numpy(exported), native.to_numpy(expected))


@pytest.mark.parametrize("outputs", [{"return_sequences": False}, {"zero_output_for_mask": False}])
def test_what_a_layer_returns_of_a_padded_row(outputs):
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(4, 20, 6)).astype("float32"), rng.random((4, 20)) < 0.6
    mask[0], mask[1, :3], mask[2, -3:] = False, False, False
    for layer in RGLRU(num_blocks=2, **outputs), RecurrentBlock(8, **outputs):
        expected = layer(x, mask=mask)
        with keras_recurrent.implementation("portable"):
            exported = layer(x, mask=mask)
        exported, expected = (native.to_numpy(y) for y in (exported, expected))
        np.testing.assert_allclose(exported, expected, rtol=1e-5, atol=1e-6)


def test_it_is_chosen_by_name():
    x = np.ones((1, 3, 2), "float32")
    with keras_recurrent.implementation("portable"):
        choice = keras_recurrent.which_implementation("linear_scan", x, -x)
        assert str(choice) == "`linear_scan` on " + dispatch.BACKEND + (
            ": keras_recurrent/portable/linear_scan.py runs"
        )
    assert keras_recurrent.which_implementation("linear_scan", x, -x).implementation != "portable"
