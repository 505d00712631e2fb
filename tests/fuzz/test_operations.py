"""Every implementation of every operation, on random inputs.

`make fuzz` draws thousands of inputs; the suite draws a few, always the same. CONTRIBUTING.md says
how to continue after a run and how to repeat a counterexample.
"""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from keras_recurrent import ops
from tests.conftest import memory_is_short
from tests.fuzz import operations
from tests.ops import judge, native
from tests.ops.test_token_kind import assert_equals_loop

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


@pytest.mark.parametrize("cut", [None, 3])
def test_check_detects_wrong_result(cut, monkeypatch):
    """A relative error of 1e-5, in one call or in the second of two calls, passes."""
    form = operations.forms("linear_scan")[0]
    sample = operations.Sample("linear_scan", form, seed=0, scales={}, runs=(), cut=cut)
    assert operations.check(sample, judge.PLAIN)
    run = judge.run

    def run_wrongly(operation, implementation, drawn, compiled):
        results = run(operation, implementation, drawn, compiled)
        is_wrong = drawn.tensors["x"].shape[1] == form.length - (cut or 0)
        return results | {"final_state": results["final_state"] * (1 + 1e-5 * is_wrong)}

    monkeypatch.setattr(judge, "run", run_wrongly)
    with pytest.raises(AssertionError, match="final_state"):
        operations.check(sample, judge.PLAIN)


SHAPE = (3, 9)
CONTEXTS = {
    "mask": st.none() | arrays.arrays(bool, SHAPE),
    "segment_ids": st.none() | arrays.arrays("int32", SHAPE, elements=st.integers(0, 3)),
    "previous_segment_id": st.none()
    | arrays.arrays("int32", SHAPE[0], elements=st.integers(-1, 3)),
}


def test_token_kind_of_random_masks_and_segments_equals_a_loop(request):
    """Some mask, segments and previous segments give wrong token kinds."""
    number, start = number_of_draws(request.config, judge.PLAIN)

    @hypothesis_test(number, seed=start)
    @hypothesis.given(st.fixed_dictionaries(CONTEXTS), st.booleans())
    def compare(context, with_state):
        state = np.zeros(SHAPE[0], "float32") if with_state else None
        kinds = ops.token_kind(np.zeros((*SHAPE, 1), "float32"), **context, initial_state=state)
        assert_equals_loop(kinds, *(context[name] for name in CONTEXTS), has_state=with_state)

    compare()
