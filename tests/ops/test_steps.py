"""Operations for a step of generation, forward only, in every implementation.

The rule is that of `judge`: at most twice as wrong as the definition in float32, or as the plain
implementation, plus two units in the last place. Its neighbors count where the inputs alone show a
result to be too wrong.
"""

import functools
import importlib
import sys

import keras
import numpy as np
import pytest

from keras_recurrent import dispatch
from keras_recurrent.backends.constants import PADDING, STARTS
from keras_recurrent.portable.hgrn2_delayed_step import current_memory
from tests.ops import native
from tests.ops.cases import unit
from tests.ops.judge import (
    INTERPRETED,
    NEIGHBORS,
    PLAIN,
    elementary_functions_of_the_gpu,
    kernels,
    longer_than,
    moved,
)
from tests.ops.steps import (
    CASES,
    DRAW,
    QUANTIZED,
    STATES,
    WITH_SQUARES,
    WRITTEN_OVER,
    Case,
    apply,
    draw,
    token_kinds,
)

if PLAIN == "jax":
    import jax

KERNELS = kernels(DRAW)
quantized_maps = pytest.mark.parametrize(
    "implementation", [i for o, i in KERNELS if o == "norm_quantized_linear"]
)
every_kernel = pytest.mark.parametrize(("operation", "implementation"), KERNELS)


def native_tensors(drawn):
    return {
        name: apply(functools.partial(native.tensor, dtype=drawn.dtypes.get(name)), t)
        for name, t in drawn.tensors.items()
    }


def run(operation, implementation, drawn):
    """The results, in float64, and their dtypes."""
    module = dispatch.IMPLEMENTATIONS[operation][implementation]
    arguments = native_tensors(drawn)
    reason = native.refusal(module, {**arguments, **drawn.options})
    if reason is not None:
        pytest.skip(f"{implementation} refuses: {reason}")
    function = functools.partial(module.function, **drawn.options)
    if implementation == "jax":  # one program is cheaper to compile than each of its operations
        function = jax.jit(function)
    results = function(**arguments)
    return [native.to_numpy(r) for r in results], [native.dtype(r) for r in results]


@functools.cache
def definition(operation):
    return getattr(
        importlib.import_module(f"keras_recurrent.backends.reference.{operation}"), operation
    )


def defined(operation, drawn, dtype):
    return definition(operation)(**drawn.tensors, **drawn.options, dtype=np.dtype(dtype))


def rounded(result, dtype):
    return (
        result.astype(dtype).astype("float64")
        if dtype != "bfloat16"
        else native.to_numpy(native.tensor(result, "bfloat16"))
    )


# The plain steps are one `keras.ops` function for all backends, so every case runs on torch; the
# sizes of the others are about Triton's tiles.
ON_ALL_BACKENDS = ["perceptron", "bfloat16, rows", "float64", "extreme"]
ON_ALL_BACKENDS += ["4 bits, blocks", "4 bits, columns", "three widths"]


def every_case_of(cases):
    nightly = set() if PLAIN == "torch" else cases.keys() - set(ON_ALL_BACKENDS)
    params = [
        pytest.param(case, id=name, marks=pytest.mark.nightly if name in nightly else ())
        for name, case in cases.items()
    ]
    return pytest.mark.parametrize("case", params)


@every_case_of(CASES)
@every_kernel
def test_forward(operation, implementation, case):
    check(operation, implementation, case)


@every_case_of(QUANTIZED)
@quantized_maps
def test_quantized(implementation, case):
    check("norm_quantized_linear", implementation, case)


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("quantize_row", [True, False])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@quantized_maps
def test_a_row_with_nan_or_infinity_gives_no_numbers(implementation, number, quantize_row):
    drawn = draw("norm_quantized_linear", Case(1, widths=(32,), quantize_row=quantize_row))
    drawn.tensors["x"][0, 3] = number
    (found,), _ = run("norm_quantized_linear", implementation, drawn)
    assert not np.isfinite(found).any()


@pytest.mark.skipif(PLAIN != "torch", reason="elsewhere arrays are no parts of others")
@quantized_maps
def test_weights_that_begin_at_no_multiple_of_16_bytes(implementation):
    x, kernel = np.ones((1, 8), "float32"), np.arange(9 * 24).reshape(9, 24) % 100
    kernel, scale = native.tensor(kernel, "int8"), native.tensor(np.ones(24), "float32")
    module = dispatch.IMPLEMENTATIONS["norm_quantized_linear"][implementation]
    given = {"x": native.tensor(x, "float32"), "kernel_scales": [scale]}
    given |= {"kernel_zeros": [None], "biases": [None]}
    if native.refusal(module, {**given, "kernels": [kernel]}):
        pytest.skip(f"{implementation} is not here")
    (found,) = module.function(**given, kernels=[kernel[1:]])
    (expected,) = module.function(**given, kernels=[kernel[1:].clone()])
    np.testing.assert_array_equal(found.cpu(), expected.cpu())


def check(operation, implementation, case):
    drawn = draw(operation, case)
    with native.precision(case.dtype):
        found, dtypes = run(operation, implementation, drawn)
        states = [drawn.dtypes[name] for name in STATES[operation]]
        if has_squares(operation, drawn):
            states = ["float64" if case.dtype == "float64" else "float32", *states]
        assert dtypes == [case.dtype] * (len(found) - len(states)) + states
        assert all(np.isfinite(result).all() for result in found)
        results = comparable(operation, case, drawn, found)
        wrong = errors(results, truth_of(operation, case, drawn))
        allowed = tolerances(operation, implementation, case, drawn, dtypes)
        # Rows of neighbors may be quantized to other integers.
        for seed in range(0 if operation == "norm_quantized_linear" else NEIGHBORS):
            if np.all(wrong <= allowed):
                break
            rng = np.random.default_rng(seed)
            near = {
                name: apply(functools.partial(moved, rng, dtype=drawn.dtypes.get(name)), t)
                for name, t in drawn.tensors.items()
            }
            near = drawn._replace(tensors=near)
            more = tolerances(operation, implementation, case, near, dtypes)
            allowed = np.maximum(allowed, more)
        assert np.all(wrong <= allowed), f"errors {wrong}, allowed {allowed}"


def has_squares(operation, drawn):
    return operation in WITH_SQUARES or "next_scale" in drawn.tensors


def comparable(operation, case, drawn, results):
    """The results without outputs of padding, which may be anything; norms instead of squares."""
    results, num_states = list(results), len(STATES[operation])
    if has_squares(operation, drawn):
        i = len(results) - 1 - num_states
        results[i] = np.sqrt(results[i])
    if num_states and case.kinds:
        is_token = token_kinds(case) != PADDING
        results[:-num_states] = [result[is_token] for result in results[:-num_states]]
    return results


def truth_of(operation, case, drawn):
    truth = defined(operation, drawn, longer_than(case.dtype))
    return comparable(operation, case, drawn, truth)


def errors(results, truth):
    """The largest error of each result."""
    pairs = zip(results, truth, strict=True)
    return np.array([np.abs(result - expected).max(initial=0) for result, expected in pairs])


def tolerances(operation, implementation, case, drawn, dtypes):
    """Returns the largest error that is allowed of each result."""
    if implementation in (PLAIN, *INTERPRETED):
        with elementary_functions_of_the_gpu():
            precision = "float64" if case.dtype == "float64" else "float32"
            yardstick = defined(operation, drawn, precision)
    else:
        yardstick, _ = run(operation, PLAIN, drawn)
    yardstick = comparable(operation, case, drawn, yardstick)
    yardstick = [rounded(result, dtype) for result, dtype in zip(yardstick, dtypes, strict=True)]
    truth = truth_of(operation, case, drawn)
    largest = [np.abs(expected).max(initial=0) for expected in truth]
    units = np.array([unit(dtype, size) for dtype, size in zip(dtypes, largest, strict=True)])
    return 2 * (errors(yardstick, truth) + units)


with_states = pytest.mark.parametrize(
    ("operation", "implementation"), [kernel for kernel in KERNELS if STATES[kernel[0]]]
)


@with_states
def test_one_row_that_starts_a_document(operation, implementation):
    """Fails if a kernel for one row reads the state of the previous document."""
    check(operation, implementation, Case(1, kinds=True, first_kind=STARTS))


@pytest.mark.parametrize(
    "case",
    [Case(3, kinds=True), Case(1, kinds=True, first_kind=PADDING)],
    ids=["three rows", "one row"],
)
@with_states
def test_padding_leaves_the_states_and_may_hold_anything(operation, implementation, case):
    """With one row, fails if a kernel for one row changes a state at padding."""
    drawn, padding = draw(operation, case), case.rows - 1
    for name in ("q", "k", "f", "v", "x", "gate"):
        if name in drawn.tensors:
            shape = drawn.tensors[name].shape[1:]
            drawn.tensors[name][padding] = np.resize([np.nan, np.inf, -np.inf], shape)
    (output, *states), _ = run(operation, implementation, drawn)
    for name, state in zip(STATES[operation], states[-len(STATES[operation]) :], strict=True):
        np.testing.assert_array_equal(state[padding], drawn.tensors[name][padding])
    assert np.isfinite(output[:padding]).all()


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "hgrn2_delayed_step"])
def test_a_delayed_memory_is_that_of_steps_that_write_it(implementation):
    """Fails if tokens are lost between two writes, or what no token has written yet is read."""
    heads, keys, limit = 3, 6, 4
    memory = np.random.default_rng(0).normal(size=(3, heads, keys, 7))
    recent = np.full((3, limit, heads * (2 * keys + 7)), np.nan)
    delayed = {"memory": memory, "recent": recent, "count": np.zeros(3)}
    for t in range(2 * limit + 3):
        drawn = draw("hgrn2_step", Case(3, widths=(16, 16), kinds=True, first_kind=t % 2), seed=t)
        plain = drawn._replace(tensors=drawn.tensors | {"memory": memory})
        (output, squares, memory), _ = run("hgrn2_step", implementation, plain)
        dtypes = {**drawn.dtypes, "recent": "float32", "count": "int32"}
        drawn = drawn._replace(tensors=drawn.tensors | delayed, dtypes=dtypes)
        found, _ = run("hgrn2_delayed_step", implementation, drawn)
        for a, b in zip(found, (output, squares), strict=False):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        delayed = dict(zip(("count", "memory", "recent"), found[2:], strict=True))
    current = current_memory(**{n: native.tensor(t, dtypes[n]) for n, t in delayed.items()})
    np.testing.assert_allclose(native.to_numpy(current), memory, rtol=1e-5, atol=1e-5)
    assert len({*delayed["count"]}) > 1


@pytest.mark.parametrize("operation", ["hgrn2_step", "hgrn2_delayed_step"])
@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if i == "triton"][:1])
def test_rows_do_not_depend_on_others(operation, implementation):
    """Fails if the number of tokens of another row decides what is read or written."""
    drawn = draw(operation, Case(6, kinds=True))
    shared = "lower_bound", "norm_scale"
    together, _ = run(operation, implementation, drawn)
    for row in range(6):
        tensors = {n: t if n in shared else t[[row]] for n, t in drawn.tensors.items()}
        alone, _ = run(operation, implementation, drawn._replace(tensors=tensors))
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_array_equal(a[[row]], b)


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if i == "triton"][:1])
def test_programs_take_several_tiles_of_slots_in_turn(implementation, monkeypatch):
    """Fails if a tile of a long buffer belongs to no program, or a token to a wrong one."""
    module = sys.modules[f"keras_recurrent.backends.{implementation}.local_attention_step"]
    monkeypatch.setattr(module, "MULTIPROCESSORS", 9)  # two programs for seven tiles
    check("local_attention_step", implementation, Case(9, channels=202, kinds=True))


@pytest.mark.skipif(PLAIN != "torch", reason="elsewhere the compiler decides what is overwritten")
@with_states
def test_a_state_is_written_over_where_it_is_owned_alone(operation, implementation):
    from keras_recurrent.backends.torch._states import inplace_states

    drawn = draw(operation, Case(2))
    given = {
        n: native.tensor(t, drawn.dtypes[n]) for n, t in drawn.tensors.items() if t is not None
    }
    before = {name: given[name].clone() for name in STATES[operation]}
    step = dispatch.IMPLEMENTATIONS[operation][implementation].function
    step = functools.partial(step, **drawn.options)
    expected = step(**given)
    for name, state in before.items():
        np.testing.assert_array_equal(given[name].cpu(), state.cpu())
    with inplace_states():
        found = step(**given)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.cpu(), b.cpu())
    for name, state in zip(STATES[operation], found[-len(STATES[operation]) :], strict=True):
        here = implementation == "triton" and name in WRITTEN_OVER[operation]
        assert (state.data_ptr() == given[name].data_ptr()) == here


@pytest.mark.skipif(PLAIN != "torch", reason="elsewhere nothing asks whether a gradient is needed")
@pytest.mark.parametrize("operation", [o for o, i in KERNELS if i == "triton"])
def test_kernels_refuse_tensors_that_need_gradients(operation):
    drawn = draw(operation, Case(1, widths=(16, 16)))
    given = native_tensors(drawn)
    first = next(iter(given))
    given[first].requires_grad_()
    reason = native.refusal(
        dispatch.IMPLEMENTATIONS[operation]["triton"], {**given, **drawn.options}
    )
    assert "has no gradients" in reason


class TestTokens:
    """`argmax`, `top_logits`, `soft_cap` and `embedding_step`, against the definitions."""

    X = np.random.default_rng(0).normal(size=(3, 50)).astype("float32")

    def check(self, operation, options=None, tolerance=0.0, **arrays):
        tensors = {name: keras.ops.convert_to_tensor(a) for name, a in arrays.items()}
        found = dispatch.run(operation, tensors | (options or {}))
        expected = definition(operation)(**arrays, **(options or {}))
        results = zip(*map(keras.tree.flatten, (found, expected)), strict=True)
        for a, b in ((a, b) for a, b in results if b is not None):
            np.testing.assert_allclose(keras.ops.convert_to_numpy(a), b, rtol=0, atol=tolerance)

    def test_argmax(self):
        x = self.X.copy()
        x[1, [7, 9]] = 100
        self.check("argmax", x=x)

    def test_top_logits(self):
        x = self.X.copy()
        x[1] = -np.inf
        x[1, [7, 3]] = 100, 99
        self.check("top_logits", {"count": 2}, tolerance=2e-6, x=x)

    def test_soft_cap(self):
        self.check("soft_cap", {"cap": 0.5}, tolerance=1e-6, x=self.X)

    def test_embedding_step(self):
        tokens, segment, position = np.array([[2, 0], [-1, 3], [0, 5]], "int32")
        given, places = {"table": self.X, "token_ids": tokens}, {"segment": segment}
        places["position"] = position
        self.check("embedding_step", {"scale": 2.0, "dtype": "float32"}, **given)
        self.check("embedding_step", {"dtype": "float32"}, **given, **places)
