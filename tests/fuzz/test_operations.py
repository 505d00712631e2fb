"""Every implementation of every operation, on random inputs.

`make fuzz` draws thousands of inputs; the suite draws a few, always the same. CONTRIBUTING.md says
how to continue after a run and how to repeat a counterexample.
"""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.conftest import memory_is_short
from tests.fuzz import operations
from tests.ops import judge, native

pytestmark = pytest.mark.nightly

BLOCK = 100  # draws of one test
DRAWS = {
    "few": {"torch": 24, "tensorflow": 24, "jax": 24, "triton": 3, "pallas": 3},
    # As many as two cores draw in two hours.
    "many": {"torch": 10_000, "tensorflow": 10_000, "jax": 2_000, "triton": 300, "pallas": 300},
}
INTERPRETED = ("triton", "pallas")  # too slow to simplify counterexamples
DRAWS_OF_A_FORM = 25  # where programs are compiled for each form
# Strategies of whether a draw is compiled. TensorFlow makes a graph in the time of ten eager runs:
# too long for a few draws; of many, one in ten is eager, since users call operations in both modes.
COMPILED = {
    "jax": st.just(True),
    "tensorflow": st.integers(0, 9).map(bool),
    "torch": st.just(False),
}


def number_of_draws(config, implementation):
    """The number of draws of an implementation, and the index of the first one."""
    draws, start = config.getoption("draws"), config.getoption("start")
    return DRAWS[draws][implementation] if draws in DRAWS else int(draws), start


def hypothesis_test(number, seed, simplified=True):
    """A decorator that makes a number of draws, the same for a seed, without a time limit."""
    settings = hypothesis.settings(
        phases=[hypothesis.Phase.generate] + [hypothesis.Phase.shrink] * simplified,
        max_examples=number,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda test: hypothesis.seed(seed)(settings(test))


def pytest_generate_tests(metafunc):
    """Makes a test of each block of draws."""
    if "implementation" not in metafunc.fixturenames:
        return
    params = []
    for operation, implementation in judge.kernels([*operations.OVER_TIME, *operations.TOKEN_WISE]):
        if implementation == "cudnn":  # which needs longer sequences than are drawn
            continue
        number, start = number_of_draws(metafunc.config, implementation)
        for first in range(start, start + number, BLOCK):
            block = (operation, implementation, first, min(BLOCK, start + number - first))
            params.append(pytest.param(*block, id=f"{operation}-{implementation}-{first}"))
    metafunc.parametrize(("operation", "implementation", "first", "number"), params)


def test_operation_on_random_inputs_matches_definition(operation, implementation, first, number):
    """A kernel is wrong for some shapes, dtypes, values, padding, or sequences in two calls."""
    forms = operations.forms(operation)
    compiled = COMPILED[judge.PLAIN]
    if judge.PLAIN == "tensorflow" and number < BLOCK:
        compiled = st.just(False)
    elif judge.PLAIN != "torch":
        if memory_is_short():
            native.forget_programs()
        chosen = first // DRAWS_OF_A_FORM + np.arange(math.ceil(number / DRAWS_OF_A_FORM))
        forms = [forms[n] for n in chosen % len(forms)]
    forms = sorted(forms, key=operations.size)  # hypothesis regards the first as the simplest
    if implementation in INTERPRETED and number < BLOCK:
        forms = forms[: max(1, len(forms) // 8)]  # in seconds

    @hypothesis_test(number, seed=first, simplified=implementation not in INTERPRETED)
    @hypothesis.given(operations.samples(operation, forms, compiled))
    def judge_sample(sample):
        hypothesis.assume(operations.check(sample, implementation))

    judge_sample()
