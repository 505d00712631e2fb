"""Operations without a state, in every implementation, against the definition in float64.

The rule is that of `test_kernels`: the plain implementation is at most twice as wrong as NumPy in
float32, plus two units in the last place; any other at most twice as wrong as the plain one.
"""

import importlib

import keras
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent import dispatch, ops
from tests.ops import native
from tests.ops.cases import round_to, unit
from tests.ops.test_kernels import INTERPRETED, PLAIN
from tests.ops.token_wise import CASES, DRAW, Case, draw

KERNELS = [
    (operation, implementation)
    for operation in DRAW
    for implementation, module in dispatch.KERNELS[operation].items()
    if not isinstance(module, str)
]
every_operation = pytest.mark.parametrize("operation", DRAW)
every_kernel = pytest.mark.parametrize(("operation", "implementation"), KERNELS)


@every_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forward_and_gradients(operation, implementation, case):
    with native.precision("float64" if "float64" in case else case.dtype):
        check(operation, implementation, draw(operation, case))


@every_kernel
def test_the_check_sees_a_wrong_result(operation, implementation):
    drawn = draw(operation, Case((4, 50)))
    results = run(operation, implementation, drawn)
    for name in results:
        broken = {**results, name: results[name] * (1 + 1e-5)}
        with pytest.raises(AssertionError, match=name):
            compare(operation, implementation, drawn, broken)


@every_kernel
def test_what_is_not_a_number_stays_so(operation, implementation):
    drawn = draw(operation, Case((4, 50)))
    first = next(iter(drawn.tensors))
    drawn.tensors[first][1, 7] = np.nan
    results = run(operation, implementation, drawn)
    for name in ("output", f"gradient of {first}"):
        assert np.isnan(results[name][1, 7]), name
        assert np.isfinite(np.delete(results[name], 1, axis=0)).all(), name


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "log_forget_gate"])
@pytest.mark.parametrize("bounded", [True, False])
def test_gates_that_are_shut_or_open(implementation, bounded):
    """What ends at float32's smallest and largest numbers is finite, and so is its gradient."""
    drawn = draw("log_forget_gate", Case((6, 4), parameter=bounded))
    drawn.tensors["logits"][:] = np.array([-1e30, -100, 0, 15, 100, 1e30])[:, None]
    if bounded:
        half = round_to("float32", np.log(0.5))
        drawn.tensors["lower_bound"][:] = [[-np.inf, -90, half, 0], [0, 0, half, -90]]
    results = run("log_forget_gate", implementation, drawn)
    truth = reference("log_forget_gate", drawn, "float64")
    for name in results:
        np.testing.assert_allclose(results[name], truth[name], rtol=1e-6, atol=1e-6, err_msg=name)
    assert (results["output"] <= 0).all()
    # Where β is 0, a gate near 1 keeps its digits.
    np.testing.assert_allclose(results["output"][3, 0], -np.log1p(np.exp(-15)), rtol=1e-6)


@every_operation
def test_agrees_with_the_definition(operation):
    drawn = draw(operation, Case((2, 3, 8)))
    output = call(operation, drawn)
    truth = reference(operation, drawn, "float64")["output"]
    np.testing.assert_allclose(numpy(output), truth, rtol=1e-5, atol=1e-6)


@every_operation
@pytest.mark.parametrize("parameter", [True, False])
def test_in_a_symbolic_graph(operation, parameter, tmp_path):
    drawn = draw(operation, Case((2, 3, 8), "bfloat16", "float32", parameter=parameter))
    inputs = {
        name: keras.Input(
            batch_shape=(None, None, 8) if t.ndim == 3 else t.shape,
            dtype=drawn.dtypes[name],
            name=name,
        )
        for name, t in drawn.tensors.items()
        if t is not None
    }
    output = getattr(ops, operation)(**inputs, **drawn.options)
    assert output.shape == (None, None, 8)
    assert output.dtype == drawn.output_dtype
    model = keras.Model(inputs, output)
    model.save(tmp_path / "model.keras")
    expected = numpy(call(operation, drawn))
    feed = {n: given(drawn, n) for n in inputs}
    for m in (model, keras.models.load_model(tmp_path / "model.keras")):
        np.testing.assert_array_equal(numpy(m(feed)), expected)


@every_operation
def test_nothing_comes_of_nothing(operation):
    drawn = draw(operation, Case((0, 3, 8)))
    assert call(operation, drawn).shape == (0, 3, 8)


@every_operation
def test_which_implementation_tells(operation):
    drawn = draw(operation, Case((2, 8)))
    tensors = [given(drawn, n) for n in drawn.tensors]
    for name in (operation, getattr(ops, operation)):
        choice = keras_recurrent.which_implementation(name, *tensors, **drawn.options)
        assert choice.implementation in dispatch.PREFERENCE[dispatch.BACKEND]
    with pytest.raises(ValueError, match=f"`{operation}` takes no argument 'mask'"):
        keras_recurrent.which_implementation(operation, *tensors, **drawn.options, mask=None)
    with keras_recurrent.implementation(PLAIN):
        choice = keras_recurrent.which_implementation(operation, *tensors, **drawn.options)
    assert choice.implementation == PLAIN


X = np.ones((2, 3, 8), "float32")
BAD = {
    "scale": (lambda: ops.rms_norm(X, X[0], epsilon=0), "`scale` must have the 1 dimensions"),
    "width": (lambda: ops.rms_norm(X, X[0, 0, :4], epsilon=0), "`scale` .* D should be 8, not 4"),
    "rank": (lambda: ops.rms_norm(X[0, 0, 0], epsilon=0), r"at least 1 dimensions \[..., D\]"),
    "dtype": (lambda: ops.rms_norm(X.astype("int32"), epsilon=0), "`x` must be one of float16"),
    "none": (lambda: ops.rms_norm(None, epsilon=0), "needs the argument `x`"),
    "epsilon": (lambda: ops.rms_norm(X, epsilon=-1.0), "`epsilon` must be .* at least 0; got -1.0"),
    "epsilon kind": (lambda: ops.rms_norm(X, epsilon="0"), "`epsilon` must be a number"),
    "activation": (
        lambda: ops.gated_linear_unit(X, X, activation="relu"),
        "`activation` must be 'silu' or 'gelu'; got 'relu'",
    ),
    "shapes": (
        lambda: ops.gated_linear_unit(X, X[:1], activation="silu"),
        r"`x` must have the shape \[...\], with ... = \(2, 3, 8\); got the shape \(1, 3, 8\)",
    ),
    "bound": (
        lambda: ops.log_forget_gate(X, X[0]),
        r"`lower_bound` must have the shape \[2, D\], .*D = 8; got the shape \(3, 8\)",
    ),
    "graph": (
        lambda: ops.gated_linear_unit(
            keras.Input((None, 4)), keras.Input((None, 5)), activation="silu"
        ),
        r"got the shape \(None, None, 5\)",
    ),
    "name": (
        lambda: ops.log_forget_gate(X, implementation="cuda"),
        "`implementation` must be one of",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_name_themselves(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def numpy(tensor):
    return keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32"))


def given(drawn, name):
    """A tensor of those drawn, None where there is none."""
    t = drawn.tensors[name]
    return None if t is None else native.tensor(t, drawn.dtypes[name])


def call(operation, drawn):
    tensors = {name: given(drawn, name) for name in drawn.tensors}
    return getattr(ops, operation)(**tensors, **drawn.options)


def run(operation, implementation, drawn):
    """{name: float64 array}: the output, and the gradient of every tensor."""
    module = dispatch.KERNELS[operation][implementation]
    tensors = {name: given(drawn, name) for name in drawn.dtypes}
    absent = {name: None for name in drawn.tensors if name not in tensors}
    reason = module.unsupported(**tensors, **absent, **drawn.options)
    if reason is not None:
        pytest.skip(f"{implementation} refuses: {reason}")

    def kernel(tensors):
        return [getattr(module, operation)(**tensors, **absent, **drawn.options)], {}

    cotangents = [native.tensor(drawn.d_output, drawn.output_dtype)]
    (output,), _, gradients = native.gradients(kernel, tensors, cotangents)
    assert native.dtype(output) == drawn.output_dtype
    assert {name: native.dtype(g) for name, g in gradients.items()} == drawn.dtypes
    results = {"output": output} | {f"gradient of {name}": g for name, g in gradients.items()}
    return {name: native.to_numpy(r) for name, r in results.items()}


def check(operation, implementation, drawn):
    compare(operation, implementation, drawn, run(operation, implementation, drawn))


def compare(operation, implementation, drawn, results):
    truth = reference(operation, drawn, "float64")
    if implementation == PLAIN or implementation in INTERPRETED:
        yardstick = reference(operation, drawn, "float32")
        if "float64" in drawn.dtypes.values():
            yardstick = truth
    else:
        yardstick = run(operation, PLAIN, drawn)
    for name, expected in truth.items():
        assert np.isfinite(results[name]).all(), f"{name}: not finite"
        wrong, allowed = (np.abs(r[name] - expected).max(initial=0) for r in (results, yardstick))
        dtype = dtype_of(drawn, name)
        units = 2 if dtype != "float64" else 16
        allowed = 2 * allowed + units * unit(dtype, np.abs(expected).max(initial=0))
        assert wrong <= allowed, f"{name}: error {wrong:.3g}, allowed {allowed:.3g}"


def dtype_of(drawn, name):
    return drawn.output_dtype if name == "output" else drawn.dtypes[name[len("gradient of ") :]]


def reference(operation, drawn, precision):
    """What the definition computes in a precision, rounded to the dtypes that a kernel returns."""
    module = importlib.import_module(f"keras_recurrent.backends.reference.{operation}")
    arguments = {**drawn.tensors, **drawn.options, "dtype": np.dtype(precision)}
    with np.errstate(over="ignore"):
        output = getattr(module, operation)(**arguments)
        gradients = getattr(module, f"{operation}_gradient")(drawn.d_output, **arguments)
    results = {"output": output}
    for name, gradient in zip(drawn.tensors, gradients, strict=True):
        assert (gradient is None) == (drawn.tensors[name] is None)
        if gradient is not None:
            results[f"gradient of {name}"] = gradient
    if precision == "float64":
        return results
    return {name: round_to(dtype_of(drawn, name), result) for name, result in results.items()}
