"""Every operation over time in every implementation of this backend, against its definition.

The definition is computed in float64. The plain implementation of a backend may be at most twice as
wrong as the token-by-token loop in float32, plus two units in the last place; any other at most
twice as wrong as the plain one.
"""

import importlib
import os

import numpy as np
import pytest

from keras_recurrent import dispatch
from tests.ops import native
from tests.ops.cases import CASES, DRAW, PARTS, Case, Drawn, beside, draw, named, round_to, unit

PLAIN = dispatch.BACKEND  # the folder of the plain implementation is named after the backend
KERNELS = [
    (operation, implementation)
    for operation in DRAW
    for implementation, module in dispatch.IMPLEMENTATIONS[operation].items()
    if not isinstance(module, str)
]
# Where NumPy stands in for a GPU, it rounds a product before adding to it: as the loop does, not as
# the plain kernels, which like a GPU round once.
INTERPRETED = ("triton",) if os.environ.get("TRITON_INTERPRET") == "1" else ()
# JAX's interpreter of TPU kernels takes up to a minute a case, so one case shows them by default.
SLOW = {"pallas": pytest.mark.slow}
every_kernel = pytest.mark.parametrize(
    ("operation", "implementation"), [pytest.param(*k, marks=SLOW.get(k[1], ())) for k in KERNELS]
)


def shortened(case, implementation):
    """NumPy walks through a kernel's tiles one by one: a few tiles do, where a GPU takes many."""
    return case._replace(length=min(case.length, 331)) if implementation in INTERPRETED else case


every_kernel_in_every_case = pytest.mark.parametrize(
    ("operation", "implementation", "case"),
    [
        pytest.param(
            *kernel,
            shortened(case, kernel[1]),
            id=f"{'-'.join(kernel)}-{name}",
            marks=() if name == "prime sizes" else SLOW.get(kernel[1], ()),
        )
        for kernel in KERNELS
        for name, case in CASES.items()
    ],
)


def every_implementation(operation):
    """Those of one operation."""
    names = [implementation for of, implementation in KERNELS if of == operation]
    names = [pytest.param(name, marks=SLOW.get(name, ())) for name in names]
    return pytest.mark.parametrize("implementation", names)


def test_all_operations_have_a_plain_implementation():
    missing = [
        name for name, row in dispatch.IMPLEMENTATIONS.items() if isinstance(row[PLAIN], str)
    ]
    assert not missing


@every_kernel_in_every_case
def test_forward_and_gradients(operation, implementation, case):
    with native.precision(case.dtype):
        check(operation, implementation, draw(operation, case))


@pytest.mark.parametrize("operation", ["gated_linear_attention", "lightning_attention"])
def test_several_groups_of_chunks(operation):
    case = Case(1, 1031, 64, kinds=True, decays="near one")
    check(operation, PLAIN, draw(operation, case))


@pytest.mark.parametrize(
    "operation", ["linear_scan", "complex_linear_scan", "rg_lru", "causal_conv1d"]
)
def test_several_chunks_of_time(operation):
    case = Case(2, 199, 600, kinds=True, state=True)
    check(operation, PLAIN, draw(operation, case))


@every_kernel
def test_padding_may_hold_anything(operation, implementation):
    drawn = draw(operation, Case(2, 19, 3, kinds=True, state=True))
    padding = drawn.token_kind == 2
    poisoned = {
        name: np.where(beside(t, padding), np.resize([np.nan, np.inf, -np.inf], t.shape), t)
        if t.ndim >= 3
        else t
        for name, t in drawn.tensors.items()
    }
    clean = run(operation, implementation, drawn)
    poisoned = run(operation, implementation, drawn._replace(tensors=poisoned))
    for name, expected in clean.items():
        if name == "output":
            shown = beside(expected, ~padding)
            expected, poisoned[name] = (np.where(shown, r, 0) for r in (expected, poisoned[name]))
        np.testing.assert_array_equal(poisoned[name], expected, err_msg=name)
        if name.startswith("gradient") and expected.shape[:2] == padding.shape:
            assert not np.any(np.where(beside(expected, padding), expected, 0)), name


@pytest.mark.parametrize(
    ("operation", "implementation"),
    [
        pytest.param(*kernel, marks=SLOW.get(kernel[1], ()))
        for kernel in KERNELS
        if kernel[0] in ("gated_linear_attention", "lightning_attention")
    ],
)
def test_a_state_that_has_all_but_decayed(operation, implementation):
    """Without keys it is all there is: 1e-26 of a state is not 0."""
    drawn = draw(operation, Case(1, 4, 3, state=True))
    drawn.tensors["k"][:] = 0
    drawn.tensors["log_f" if operation.startswith("gated") else "log_decay"][:] = -15
    results = run(operation, implementation, drawn)
    for name, truth in reference(operation, drawn, "float64").items():
        if name in ("output", "final_state", "gradient of q", "gradient of initial_state"):
            last = truth[:, -1] if name in ("output", "gradient of q") else truth
            found = results[name][:, -1] if name in ("output", "gradient of q") else results[name]
            np.testing.assert_allclose(found, last, rtol=1e-5, atol=1e-31, err_msg=name)


# {tensors: (first, end) of the outputs that their token 10 of 24 may reach}. Token 13 starts a
# document, and a window is 6.
LATER, ANY = (10, 24), (0, 24)
REACH = {
    "linear_scan": {("x", "log_a"): LATER},
    "complex_linear_scan": {("x", "log_a", "phase"): LATER},
    "rg_lru": {("x", "gate_a", "gate_x"): LATER},
    "causal_conv1d": {("x",): (10, 13)},
    "gated_linear_attention": {("q",): (10, 11), ("k", "v", "log_f"): ANY},
    "lightning_attention": {("q",): (10, 11), ("k", "v"): ANY},
    "sliding_window_attention": {("q",): (10, 11), ("k",): (10, 13), ("v",): ANY},
}


@every_kernel
def test_how_far_what_is_not_finite_reaches(operation, implementation):
    """As the operations' docstrings have it, and never into another row."""
    drawn = draw(operation, Case(2, 24, 3, activation=None))
    drawn = drawn._replace(token_kind=np.zeros((2, 24), "int8"))
    drawn.token_kind[:, 13] = 1
    clean = run(operation, implementation, drawn)
    for names, (first, end) in REACH[operation].items():
        tensors = {name: t.copy() for name, t in drawn.tensors.items()}
        for name in names:
            tensors[name][0, 10] = np.nan
        results = run(operation, implementation, drawn._replace(tensors=tensors))
        assert np.isnan(results["output"][0, 10]).all(), names
        for name, expected in clean.items():
            if expected.shape[0] == 2:
                np.testing.assert_array_equal(results[name][1], expected[1], err_msg=name)
        for apart in (slice(0, first), slice(end, None)):
            found, expected = (r["output"][0, apart] for r in (results, clean))
            np.testing.assert_array_equal(found, expected, err_msg=str(names))


@every_kernel
def test_rows_of_padding_alone(operation, implementation):
    drawn = draw(operation, Case(2, 9, 3, kinds=True, state=True))
    drawn.token_kind[0] = 2
    drawn.d_output[0] = 0
    results = run(operation, implementation, drawn)
    for name, before in named("final_state", drawn.initial_state).items():
        np.testing.assert_array_equal(results[name][0], before[0], err_msg=name)
    for name, gradient in named("gradient of initial_state", drawn.d_final_state).items():
        np.testing.assert_array_equal(results[name][0], gradient[0], err_msg=name)


@every_kernel
def test_the_check_sees_a_wrong_result(operation, implementation):
    drawn = draw(operation, CASES["prime sizes"])
    results = run(operation, implementation, drawn)
    for name in results:
        off = np.where(results[name], results[name] * (1 + 1e-4), 1e-4)
        broken = {**results, name: off}
        with pytest.raises(AssertionError, match=name):
            compare(operation, implementation, drawn, broken)


def run(operation, implementation, drawn):
    module = dispatch.IMPLEMENTATIONS[operation][implementation]

    def kernel(**arguments):
        reason = native.refusal(module, arguments)
        if reason is not None:
            pytest.skip(f"{implementation} refuses: {reason}")
        return getattr(module, operation)(**arguments)

    with native.interpreted(implementation):
        return native.run(kernel, drawn)


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
    coarsest = min(drawn.dtypes.values(), key=["bfloat16", "float16", "float32", "float64"].index)
    # float64 is judged by its distance to the loop in float64: a few roundings a token.
    units = 2 if coarsest != "float64" else 16

    def error(results, name):
        difference = np.abs(results[name] - truth[name])
        if name == "output" and drawn.token_kind is not None:
            difference = np.where(beside(difference, drawn.token_kind) == 2, 0, difference)
        return difference.max(initial=0)

    # A state is one point of a path: the whole path says how wrong it may be.
    path = {"final_state": "output", "gradient of initial_state": f"gradient of {drawn.output}"}
    path |= {f"gradient of initial_state {p}": f"gradient of {t}" for p, t in PARTS.items()}
    for name, expected in truth.items():
        if name == "final_state position":
            np.testing.assert_array_equal(results[name], expected, err_msg=name)
            continue
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
        **drawn.options,
    }
    output, final_state = getattr(module, operation)(**drawn.tensors, **context)
    gradients = getattr(module, f"{operation}_gradient")(
        drawn.d_output, drawn.d_final_state, **drawn.tensors, **context
    )
    given = drawn.tensors | {"initial_state": drawn.initial_state}
    results = {"output": output, **named("final_state", final_state)}
    for (name, argument), gradient in zip(given.items(), gradients, strict=True):
        if argument is not None:
            results |= named(f"gradient of {name}", gradient)
    if precision == "float64":
        return results

    def rounded(name, result):
        name = name.removeprefix("gradient of ").replace("final_state", "initial_state")
        name = drawn.output if name == "output" else name.replace("initial_state", "state")
        return round_to(drawn.dtypes.get(name, precision), result)

    return {name: rounded(name, result) for name, result in results.items()}
