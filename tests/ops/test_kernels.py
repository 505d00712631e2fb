"""Every operation in every implementation of this backend, against the definition in float64.

The plain implementation of a backend may be at most twice as wrong as the token-by-token loop in
float32, plus two units in the last place; any other at most twice as wrong as the plain one.
"""

import importlib

import numpy as np
import pytest

from keras_recurrent import dispatch
from tests.ops import native
from tests.ops.cases import CASES, Case, Drawn, draw, round_to, unit

PLAIN = dispatch.BACKEND  # the folder of the plain implementation is named after the backend
KERNELS = [
    (operation, implementation)
    for operation, row in dispatch.KERNELS.items()
    for implementation, module in row.items()
    if not isinstance(module, str)
]
every_kernel = pytest.mark.parametrize(("operation", "implementation"), KERNELS)


def test_all_operations_have_a_plain_implementation():
    missing = [name for name, row in dispatch.KERNELS.items() if isinstance(row[PLAIN], str)]
    assert not missing


@every_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forward_and_gradients(operation, implementation, case):
    with native.precision(case.dtype):
        check(operation, implementation, draw(operation, case))


@every_kernel
def test_padding_may_hold_anything(operation, implementation):
    case = Case(2, 19, 3, kinds=True, state=True)
    drawn = draw(operation, case)
    padding = drawn.token_kind[:, :, None] == 2
    poisoned = {
        name: np.where(padding, [[[np.nan, np.inf, -np.inf] * (t.shape[2] // 3)]], t)
        if t.ndim == 3
        else t
        for name, t in drawn.tensors.items()
    }
    clean = run(operation, implementation, drawn)
    poisoned = run(operation, implementation, drawn._replace(tensors=poisoned))
    for name, expected in clean.items():
        if name == "output":
            expected, poisoned[name] = (np.where(padding, 0, r) for r in (expected, poisoned[name]))
        np.testing.assert_array_equal(poisoned[name], expected, err_msg=name)
        if name.startswith("gradient") and expected.shape[:2] == padding.shape[:2]:
            assert not np.any(np.where(padding, expected, 0)), name


@every_kernel
def test_rows_of_padding_alone(operation, implementation):
    drawn = draw(operation, Case(2, 9, 3, kinds=True, state=True))
    drawn.token_kind[0] = 2
    drawn.d_output[0] = 0
    results = run(operation, implementation, drawn)
    np.testing.assert_array_equal(results["final_state"][0], drawn.initial_state[0])
    np.testing.assert_array_equal(results["gradient of initial_state"][0], drawn.d_final_state[0])


@every_kernel
def test_the_check_sees_a_wrong_result(operation, implementation):
    drawn = draw(operation, CASES["prime sizes"])
    results = run(operation, implementation, drawn)
    for name in results:
        broken = {**results, name: results[name] * (1 + 1e-4)}
        with pytest.raises(AssertionError, match=name):
            compare(operation, implementation, drawn, broken)


def run(operation, implementation, drawn):
    module = dispatch.KERNELS[operation][implementation]
    return native.run(getattr(module, operation), drawn)


def check(operation, implementation, drawn):
    compare(operation, implementation, drawn, run(operation, implementation, drawn))


def compare(operation, implementation, drawn, results):
    truth = reference(operation, drawn, "float64")
    if implementation == PLAIN:
        yardstick = reference(operation, drawn, "float32")
        if "float64" in drawn.dtypes.values():
            yardstick = truth
    else:
        yardstick = run(operation, PLAIN, drawn)
    coarsest = min(drawn.dtypes.values(), key=["bfloat16", "float16", "float32", "float64"].index)
    # float64 is judged by its distance to the loop in float64: a few roundings a token.
    units = 2 if coarsest != "float64" else 16

    def error(results, name):
        difference = np.abs(results[name] - truth[name])
        if name == "output" and drawn.token_kind is not None:
            difference = np.where(drawn.token_kind[:, :, None] == 2, 0, difference)
        return difference.max(initial=0)

    # A state is one point of a path: the whole path says how wrong it may be.
    path = {"final_state": "output", "gradient of initial_state": "gradient of x"}
    for name, expected in truth.items():
        assert np.isfinite(results[name]).all(), f"{name}: not finite"
        allowed = max(error(yardstick, name), error(yardstick, path.get(name, name)))
        allowed = 2 * allowed + units * unit(coarsest, np.abs(expected).max(initial=0))
        wrong = error(results, name)
        assert wrong <= allowed, f"{name}: error {wrong:.3g}, allowed {allowed:.3g}"


def reference(operation, drawn: Drawn, precision):
    """What the definition computes in a precision, rounded to the dtypes that a kernel returns."""
    module = importlib.import_module(f"keras_recurrent.backends.reference.{operation}")
    context = {
        "initial_state": drawn.initial_state,
        "token_kind": drawn.token_kind,
        "dtype": np.dtype(precision),
    }
    output, final_state = getattr(module, operation)(**drawn.tensors, **context)
    gradients = getattr(module, f"{operation}_gradient")(
        drawn.d_output, drawn.d_final_state, **drawn.tensors, **context
    )
    names = [*drawn.tensors, "initial_state"]
    results = {"output": output, "final_state": final_state}
    dtypes = {"output": drawn.dtypes["x"], "final_state": precision}
    for name, gradient in zip(names, gradients, strict=True):
        if name in drawn.tensors or drawn.initial_state is not None:
            results[f"gradient of {name}"] = gradient
            dtypes[f"gradient of {name}"] = drawn.dtypes.get(name, precision)
    if precision == "float64":
        return results
    return {name: round_to(dtypes[name], result) for name, result in results.items()}
