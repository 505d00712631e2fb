"""Every implementation of every operation, on inputs that are drawn freely.

`make fuzz` draws thousands; the suite draws a few, the same each time. CONTRIBUTING.md says how to
go on where a run ended, and how to run a counterexample again.
"""

import math

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from keras_recurrent import ops
from tests.conftest import memory_is_short
from tests.fuzz import operations
from tests.ops import judge, native
from tests.ops.test_kernels import SLOW
from tests.ops.test_token_kind import walk

pytestmark = pytest.mark.nightly

BLOCK = 100  # draws of one test
DRAWS = {
    "few": {"torch": 24, "tensorflow": 24, "jax": 24, "triton": 3, "pallas": 3},
    # What a machine of two cores does in two hours.
    "many": {"torch": 10_000, "tensorflow": 10_000, "jax": 2_000, "triton": 300, "pallas": 300},
}
INTERPRETED = ("triton", "pallas")  # so slowly that counterexamples are not simplified
DRAWS_OF_A_FORM = 25  # where programs are compiled for each form
# Whether a draw is compiled. TensorFlow makes a graph in the time of ten runs without one: too long
# for a few draws, and of many one in ten does without, as operations are called both ways.
COMPILED = {
    "jax": st.just(True),
    "tensorflow": st.integers(0, 9).map(bool),
    "torch": st.just(False),
}


def pytest_generate_tests(metafunc):
    """One test for each block of draws."""
    if "implementation" not in metafunc.fixturenames:
        return
    draws, start = (metafunc.config.getoption(name) for name in ("draws", "start"))
    blocks = []
    for operation, implementation in judge.kernels([*operations.OVER_TIME, *operations.TOKEN_WISE]):
        if implementation == "cudnn":  # which needs longer sequences than are drawn
            continue
        end = start + (DRAWS[draws][implementation] if draws in DRAWS else int(draws))
        for first in range(start, end, BLOCK):
            block = (operation, implementation, first, min(BLOCK, end - first))
            name = f"{operation}-{implementation}-{first}"
            marks = [SLOW[implementation]] if implementation in SLOW else []
            blocks.append(pytest.param(*block, id=name, marks=marks))
    metafunc.parametrize(("operation", "implementation", "first", "number"), blocks)


def test_operations(operation, implementation, first, number):
    forms = operations.forms(operation)
    compiled = COMPILED[judge.PLAIN]
    if judge.PLAIN == "tensorflow" and number < BLOCK:
        compiled = st.just(False)
    elif judge.PLAIN != "torch":
        if memory_is_short():
            native.forget_programs()
        chosen = first // DRAWS_OF_A_FORM + np.arange(math.ceil(number / DRAWS_OF_A_FORM))
        forms = [forms[n] for n in chosen % len(forms)]
    forms = sorted(forms, key=operations.size)  # hypothesis takes the first for the simplest
    if implementation in INTERPRETED and number < BLOCK:
        forms = forms[: max(1, len(forms) // 8)]  # in seconds

    @drawn(number, seed=first, simplified=implementation not in INTERPRETED)
    @hypothesis.given(operations.samples(operation, forms, compiled))
    def judged(sample):
        hypothesis.assume(operations.check(sample, implementation))

    judged()


def test_the_check_sees_a_wrong_result(monkeypatch):
    """Whole, and in parts."""
    form = operations.forms("linear_scan")[0]
    for cut, wrong in ((None, form.length), (3, form.length - 3)):
        sample = operations.Sample("linear_scan", form, seed=0, scales={}, runs=(), cut=cut)
        assert operations.check(sample, judge.PLAIN)
        run = judge.run

        def broken(operation, implementation, drawn, compiled, run=run, wrong=wrong):
            results = run(operation, implementation, drawn, compiled)
            off = drawn.tensors["x"].shape[1] == wrong
            return results | {"final_state": results["final_state"] * (1 + 1e-5 * off)}

        with monkeypatch.context() as patch:
            patch.setattr(judge, "run", broken)
            with pytest.raises(AssertionError, match="final_state"):
                operations.check(sample, judge.PLAIN)


SHAPE = (3, 9)
KINDS = {
    "mask": st.none() | arrays.arrays(bool, SHAPE),
    "segment_ids": st.none() | arrays.arrays("int32", SHAPE, elements=st.integers(0, 3)),
    "previous_segment_id": st.none()
    | arrays.arrays("int32", SHAPE[0], elements=st.integers(-1, 3)),
}


def test_token_kinds(request):
    """Masks and segments of any sort become the kinds that a walk along the row finds."""
    draws, start = (request.config.getoption(name) for name in ("draws", "start"))
    number = DRAWS[draws][judge.PLAIN] if draws in DRAWS else int(draws)

    @drawn(number, seed=start)
    @hypothesis.given(st.fixed_dictionaries(KINDS), st.booleans())
    def judged(tokens, with_state):
        state = np.zeros(SHAPE[0], "float32") if with_state else None
        kinds = ops.token_kind(np.zeros((*SHAPE, 1), "float32"), **tokens, initial_state=state)
        mask, segments = tokens["mask"], tokens["segment_ids"]
        previous = tokens["previous_segment_id"]
        for row, found in enumerate(keras.ops.convert_to_numpy(kinds)):
            before = None if with_state else -1
            if previous is not None:
                before = previous[row]
                if segments is None:
                    before = min(before, 0)  # a row without segments goes on from any
            expected = walk(
                np.ones(SHAPE[1]) if mask is None else mask[row],
                np.zeros(SHAPE[1]) if segments is None else segments[row],
                before,
            )
            np.testing.assert_array_equal(found, expected)

    judged()


def drawn(number, seed, simplified=True):
    """How many draws hypothesis makes, the same for a seed; a long one is no fault."""
    phases = [hypothesis.Phase.generate] + [hypothesis.Phase.shrink] * simplified
    settings = hypothesis.settings(
        phases=phases,
        max_examples=number,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda test: hypothesis.seed(seed)(settings(test))
