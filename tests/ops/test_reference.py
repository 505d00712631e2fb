"""The definitions' gradients, written out by hand, against differences of the definitions."""

import importlib

import numpy as np
import pytest

from keras_recurrent import dispatch
from keras_recurrent.backends.reference import log_forget_gate
from tests.ops import steps, token_wise
from tests.ops.cases import CONSTANTS, DRAW, Case, beside, draw, named, unnamed

pytestmark = pytest.mark.once

# Their outputs at padding are states, too; those of others mean nothing, and have no gradient.
OUTPUTS_ARE_STATES = ("linear_scan", "complex_linear_scan", "rg_lru")


def test_every_operation_is_drawn():
    # Those named here have tests of their own: test_linear_crossentropy.py, test_steps.py.
    others = "linear_crossentropy", "argmax", "top_logits", "soft_cap", "embedding_step"
    drawn = [*DRAW, *token_wise.DRAW, *steps.DRAW, *others]
    assert sorted(drawn) == sorted(dispatch.IMPLEMENTATIONS)


@pytest.mark.parametrize("operation", DRAW)
@pytest.mark.parametrize("kinds", [False, True])
def test_gradients_are_the_slopes(operation, kinds):
    check_slopes(operation, Case(2, 7, 2, "float64", kinds=kinds, state=True))


def test_gradients_are_the_slopes_where_decays_make_the_keys():
    case = Case(2, 7, 2, "float64", kinds=True, state=True, tied=True)
    check_slopes("gated_linear_attention", case)


@pytest.mark.parametrize("operation", token_wise.DRAW)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("parameter", [True, False])
def test_gradients_are_the_slopes_without_a_state(operation, activation, parameter):
    case = token_wise.Case((2, 3, 4), "float64", parameter=parameter, activation=activation)
    module = importlib.import_module(f"keras_recurrent.backends.reference.{operation}")
    drawn = token_wise.draw(operation, case, seed=1)

    def loss(arguments):
        return np.sum(getattr(module, operation)(**arguments, **drawn.options) * drawn.d_output)

    gradients = getattr(module, f"{operation}_gradient")(
        drawn.d_output, **drawn.tensors, **drawn.options
    )
    gradients = dict(zip(drawn.tensors, gradients, strict=True))
    for name in token_wise.INTEGERS:
        assert gradients.pop(name, None) is None
    if operation == "log_forget_gate" and parameter:
        del gradients["lower_bound"]  # a pair that belongs together: see below
    check_differences(loss, drawn.tensors, gradients)


def test_gradients_of_a_lower_bound_are_the_slopes():
    """Of the definition by β, and of its formula by log β and log(1 - β), each by itself."""
    drawn = token_wise.draw("log_forget_gate", token_wise.Case((2, 3, 4), "float64"), seed=1)
    logits, bound = drawn.tensors.values()

    def loss(arguments):
        pair = np.log([arguments["beta"], 1 - arguments["beta"]])
        return np.sum(log_forget_gate.log_forget_gate(logits, pair) * drawn.d_output)

    def loss_of_formula(arguments):
        log_bound, log_rest = arguments["lower_bound"]
        log_f = np.logaddexp(log_bound, log_rest - np.logaddexp(0, -logits))
        return np.sum(log_f * drawn.d_output)

    _, d_bound = log_forget_gate.log_forget_gate_gradient(drawn.d_output, logits, bound)
    check_differences(loss_of_formula, {"lower_bound": bound}, {"lower_bound": d_bound})
    beta = np.exp(bound[0])
    check_differences(loss, {"beta": beta}, {"beta": d_bound[0] / beta - d_bound[1] / (1 - beta)})


def check_slopes(operation, case):
    module = importlib.import_module(f"keras_recurrent.backends.reference.{operation}")
    drawn = draw(operation, case, seed=1)
    options = {**drawn.options, "token_kind": drawn.token_kind}
    arguments = drawn.tensors | named("initial_state", drawn.initial_state)
    weights = drawn.d_output
    if drawn.token_kind is not None and operation not in OUTPUTS_ARE_STATES:
        weights = np.where(beside(weights, drawn.token_kind) == 2, 0, weights)

    def with_state(arguments):
        parts = {n: a for n, a in arguments.items() if n.startswith("initial_state")}
        tensors = {n: a for n, a in arguments.items() if n not in parts}
        return tensors | {"initial_state": unnamed("initial_state", parts)}

    def loss(arguments):
        output, final = getattr(module, operation)(**with_state(arguments), **options)
        final, d_final = (named("", state) for state in (final, drawn.d_final_state))
        return np.sum(output * weights) + sum(np.sum(final[n] * d_final[n]) for n in d_final)

    *gradients, d_state = getattr(module, f"{operation}_gradient")(
        drawn.d_output, drawn.d_final_state, **with_state(arguments), **options
    )
    gradients = dict(zip(drawn.tensors, gradients, strict=True)) | named("initial_state", d_state)
    for name in CONSTANTS:
        if name in gradients:
            assert not gradients.pop(name).any()
    check_differences(loss, arguments, gradients)


def check_differences(loss, arguments, gradients):
    for name, gradient in gradients.items():
        argument = arguments[name]
        if argument is None:
            assert gradient is None
            continue
        slopes = np.empty_like(argument)
        for index in np.ndindex(argument.shape):
            step = np.zeros_like(argument)
            step[index] = 1e-5
            ahead, behind = (loss(arguments | {name: argument + sign * step}) for sign in (1, -1))
            slopes[index] = (ahead - behind) / 2e-5
        np.testing.assert_allclose(gradient, slopes, rtol=1e-7, atol=1e-8, err_msg=name)
