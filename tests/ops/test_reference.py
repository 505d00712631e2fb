"""The definitions' gradients, written out by hand, against differences of the definitions."""

import importlib

import numpy as np
import pytest

from keras_recurrent import dispatch
from tests.ops.cases import DRAW, Case, draw


def test_every_operation_is_drawn():
    assert set(DRAW) == set(dispatch.KERNELS)


@pytest.mark.parametrize("operation", DRAW)
@pytest.mark.parametrize("kinds", [False, True])
def test_gradients_are_the_slopes(operation, kinds):
    module = importlib.import_module(f"keras_recurrent.backends.reference.{operation}")
    drawn = draw(operation, Case(2, 7, 2, "float64", kinds=kinds, state=True), seed=1)
    arguments = drawn.tensors | {"initial_state": drawn.initial_state}

    def loss(arguments):
        output, final_state = getattr(module, operation)(**arguments, token_kind=drawn.token_kind)
        return np.sum(output * drawn.d_output) + np.sum(final_state * drawn.d_final_state)

    gradients = getattr(module, f"{operation}_gradient")(
        drawn.d_output, drawn.d_final_state, **arguments, token_kind=drawn.token_kind
    )
    for (name, argument), gradient in zip(arguments.items(), gradients, strict=True):
        slopes = np.empty_like(argument)
        for index in np.ndindex(argument.shape):
            step = np.zeros_like(argument)
            step[index] = 1e-5
            ahead, behind = (loss(arguments | {name: argument + sign * step}) for sign in (1, -1))
            slopes[index] = (ahead - behind) / 2e-5
        np.testing.assert_allclose(gradient, slopes, rtol=1e-7, atol=1e-8, err_msg=name)
