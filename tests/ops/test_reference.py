"""The gradients of the definitions, written by hand, against differences of the definitions.

Also: the judge sees wrong results, and every operation has inputs.
"""

import numpy as np
import pytest

from keras_recurrent import dispatch
from keras_recurrent.backends.reference import log_forget_gate
from tests.ops import cases, losses, small, steps, token_wise
from tests.ops.cases import CONSTANTS, align, flatten, nest
from tests.ops.judge import (
    PLAIN,
    compare,
    kernels,
    module_of,
    parametrize_kernels,
    reference,
    run,
)

# Operations whose outputs at padding are states. Other outputs at padding have no gradient.
OUTPUTS_ARE_STATES = ("linear_scan", "complex_linear_scan", "rg_lru")
# {name: operation, case}
SLOPES = {
    f"{operation}, {'' if kinds else 'no '}token kinds": (
        operation,
        cases.Case(2, 7, 2, "float64", kinds=kinds, state=True),
    )
    for operation in cases.DRAW
    for kinds in (True, False)
}
SLOPES |= {
    "gated_linear_attention, tied": (
        "gated_linear_attention",
        cases.Case(2, 7, 2, "float64", kinds=True, state=True, tied=True),
    ),
    "linear_crossentropy": (
        "linear_crossentropy",
        losses.Case((2, 3), dtype="float64", soft_cap=2.0),
    ),
}
TOKEN_WISE = {
    "rms_norm": {"scale": {}, "no scale": {"parameter": False}},
    "log_forget_gate": {"bound": {}, "no bound": {"parameter": False}},
    "gated_linear_unit": {"silu": {}, "gelu": {"activation": "gelu"}},
    "token_crossentropy": {"logits": {}},
}
SLOPES |= {
    f"{operation}, {name}": (operation, token_wise.Case((2, 3, 4), "float64", **options))
    for operation, variants in TOKEN_WISE.items()
    for name, options in variants.items()
}


@pytest.mark.once
def test_every_operation_has_inputs():
    """An operation is judged by no test: it is neither drawn nor in `TOKEN_OPERATIONS`."""
    others = "argmax", "top_logits", "soft_cap", "embedding_step"  # in test_steps.py
    drawn = [*small.OPERATIONS, *steps.DRAW, *others]
    assert sorted(drawn) == sorted(dispatch.IMPLEMENTATIONS)


@pytest.mark.once
@pytest.mark.parametrize("name", SLOPES)
def test_gradient_of_definition_equals_its_slope(name):
    """A gradient of a definition is wrong: a kernel with the same mistake would pass."""
    operation, case = SLOPES[name]
    drawn = small.draw_case(operation, case, seed=1)
    if operation == "linear_crossentropy":  # A weight of 0 would hide an invalid token.
        weights = drawn.tensors["sample_weight"]
        weights[weights == 0] = 0.5
        drawn.tensors["tokens"] %= case.vocabulary
    d_results = drawn.cotangents
    if drawn.padding is not None and operation not in OUTPUTS_ARE_STATES:
        padding = align(drawn.padding, drawn.d_output)
        d_results["output"] = np.where(padding, 0, drawn.d_output)
    definition = getattr(module_of(operation, "reference"), operation)

    def loss(arguments):
        results = definition(**drawn.arguments | nest(arguments), **drawn.options)
        results = flatten(drawn.name_results(results))
        return sum(np.sum(results[name] * d_result) for name, d_result in d_results.items())

    gradients = reference(operation, drawn, "float64")
    arguments = flatten(drawn.arguments)
    for name in drawn.differentiated:
        gradient = gradients[f"gradient of {name}"]
        if name in CONSTANTS.get(operation, ()):
            assert not gradient.any()
        elif name != "lower_bound":  # log β and log(1 - β) depend on each other.
            assert_slope(loss, arguments, name, gradient)


@pytest.mark.once
def test_gradient_of_lower_bound_equals_slope_by_beta():
    """The gradient is wrong by β, or by log β and log(1 - β) in the formula of the docstring."""
    case = token_wise.Case((2, 3, 4), "float64")
    drawn = token_wise.draw("log_forget_gate", case, seed=1)
    logits, bound = drawn.tensors.values()

    def loss(arguments):
        pair = np.log([arguments["beta"], 1 - arguments["beta"]])
        return np.sum(log_forget_gate.log_forget_gate(logits, pair) * drawn.d_output)

    def loss_of_formula(arguments):
        log_beta, log_rest = arguments["lower_bound"]
        log_f = np.logaddexp(log_beta, log_rest - np.logaddexp(0, -logits))
        return np.sum(log_f * drawn.d_output)

    _, d_bound = log_forget_gate.log_forget_gate_gradient(drawn.d_output, logits, bound)
    assert_slope(loss_of_formula, {"lower_bound": bound}, "lower_bound", d_bound)
    beta = np.exp(bound[0])
    assert_slope(loss, {"beta": beta}, "beta", d_bound[0] / beta - d_bound[1] / (1 - beta))


def assert_slope(loss, arguments, name, gradient):
    """Compares a gradient with central differences of the loss."""
    slopes = np.empty_like(arguments[name])
    for index in np.ndindex(slopes.shape):
        step = np.zeros_like(slopes)
        step[index] = 1e-5
        right, left = (loss(arguments | {name: arguments[name] + sign * step}) for sign in (1, -1))
        slopes[index] = (right - left) / 2e-5
    np.testing.assert_allclose(gradient, slopes, rtol=1e-7, atol=1e-8, err_msg=name)


@parametrize_kernels(
    kernels([*cases.DRAW, *token_wise.DRAW]),
    nightly=lambda kernel: kernel not in (("linear_scan", PLAIN), ("rms_norm", PLAIN)),
)
def test_judge_detects_wrong_result(operation, implementation):
    """A kernel with a relative error of 1e-4, or 1e-5 on each token, passes all tests."""
    relative_error, case = 1e-5, token_wise.Case((4, 50))
    if operation in cases.DRAW:
        relative_error, case = 1e-4, cases.CASES["prime sizes"]
    drawn = small.draw_case(operation, case)
    results = run(operation, implementation, drawn)
    for name, result in results.items():
        wrong = np.where(result, result * (1 + relative_error), relative_error)
        with pytest.raises(AssertionError, match=name):
            compare(operation, implementation, drawn, {**results, name: wrong})
