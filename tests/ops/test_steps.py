"""Operations for a step of generation, forward only, in every implementation.

The rule is that of `judge`: at most twice as wrong as the definition in float32, or as the plain
implementation, plus two units in the last place.
"""

import functools
import importlib

import keras
import numpy as np
import pytest

from keras_recurrent import dispatch, ops, which_implementation
from keras_recurrent.backends.constants import PADDING, STARTS
from tests.ops import native
from tests.ops.cases import unit
from tests.ops.judge import INTERPRETED, PLAIN, kernels, longer_than
from tests.ops.steps import (
    CASES,
    DRAW,
    QUANTIZED,
    STATES,
    WRITTEN_OVER,
    Case,
    draw,
    token_kinds,
)

KERNELS = kernels(DRAW)
quantized_maps = pytest.mark.parametrize(
    "implementation", [i for o, i in KERNELS if o == "norm_quantized_linear"]
)
every_kernel = pytest.mark.parametrize(("operation", "implementation"), KERNELS)


def run(operation, implementation, drawn):
    """The results, in float64, and their dtypes."""
    module = dispatch.IMPLEMENTATIONS[operation][implementation]
    arguments = {
        name: None if t is None else native.tensor(t, drawn.dtypes[name])
        for name, t in drawn.tensors.items()
    }
    reason = native.refusal(module, {**arguments, **drawn.options})
    if reason is not None:
        pytest.skip(f"{implementation} refuses: {reason}")
    results = getattr(module, operation)(**arguments, **drawn.options)
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@every_kernel
def test_forward(operation, implementation, case):
    check(operation, implementation, case)


@pytest.mark.parametrize("case", QUANTIZED.values(), ids=QUANTIZED)
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
    maps = functools.partial(ops.norm_quantized_linear, implementation=implementation)
    if native.refusal(
        dispatch.IMPLEMENTATIONS["norm_quantized_linear"][implementation],
        {"x": native.tensor(x, "float32"), "scale": None, "kernel": kernel, "kernel_scale": scale},
    ):
        pytest.skip(f"{implementation} is not here")
    (found,) = maps(native.tensor(x, "float32"), [kernel[1:]], [scale])
    (expected,) = maps(native.tensor(x, "float32"), [kernel[1:].clone()], [scale])
    np.testing.assert_array_equal(found.cpu(), expected.cpu())


@quantized_maps
def test_quantized_maps_of_no_rows(implementation):
    drawn = draw("norm_quantized_linear", Case(1, widths=(32,)))
    drawn.tensors["x"] = drawn.tensors["x"][:0]
    (found,), _ = run("norm_quantized_linear", implementation, drawn)
    assert found.shape == (0, 32)


def check(operation, implementation, case):
    drawn = draw(operation, case)
    with native.precision(case.dtype):
        found, dtypes = run(operation, implementation, drawn)
        exact = longer_than(case.dtype)
        truth = defined(operation, drawn, exact)
        yardstick = defined(operation, drawn, "float64" if case.dtype == "float64" else "float32")
        if implementation not in (PLAIN, *INTERPRETED):
            yardstick, _ = run(operation, PLAIN, drawn)
        states = [drawn.dtypes[name] for name in STATES[operation]]
        assert dtypes == [case.dtype] * (len(truth) - len(states)) + states
        real = np.ones(case.rows, bool)
        if states and case.kinds:
            real = token_kinds(case) != PADDING
        results = zip(found, truth, yardstick, dtypes, strict=True)
        for i, (result, expected, other, dtype) in enumerate(results):
            assert np.isfinite(result).all()
            if i == 0:  # the output of padding may be anything
                result, expected, other = result[real], expected[real], other[real]
            allowed = 2 * np.abs(rounded(other, dtype) - expected).max(initial=0)
            allowed += 2 * unit(dtype, np.abs(expected).max(initial=0))
            assert np.abs(result - expected).max(initial=0) <= allowed


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
    for name, state in zip(STATES[operation], states, strict=True):
        np.testing.assert_array_equal(state[padding], drawn.tensors[name][padding])
    assert np.isfinite(output[:padding]).all()


@pytest.mark.skipif(PLAIN != "torch", reason="elsewhere the compiler decides what is overwritten")
@with_states
def test_a_state_is_written_over_where_it_is_owned_alone(operation, implementation):
    from keras_recurrent.backends.torch._states import inplace_states

    drawn = draw(operation, Case(2))
    given = {
        n: native.tensor(t, drawn.dtypes[n]) for n, t in drawn.tensors.items() if t is not None
    }
    before = {name: given[name].clone() for name in STATES[operation]}
    step = functools.partial(getattr(ops, operation), implementation=implementation)
    expected = step(**given)
    for name, state in before.items():
        np.testing.assert_array_equal(given[name].cpu(), state.cpu())
    with inplace_states():
        found = step(**given)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.cpu(), b.cpu())
    for name, state in zip(STATES[operation], found[1:], strict=True):
        here = implementation == "triton" and name in WRITTEN_OVER[operation]
        assert (state.data_ptr() == given[name].data_ptr()) == here


X, KERNEL = np.ones((2, 3), "float32"), np.ones((3, 4), "float32")
STEP = {
    **dict.fromkeys(("x", "gate", "hidden"), np.ones((1, 4), "float32")),
    **dict.fromkeys(("bias_a", "bias_x"), np.ones((2, 2), "float32")),
    **dict.fromkeys(("kernel_a", "kernel_x"), np.ones((2, 2, 2), "float32")),
    **dict.fromkeys(("conv_bias", "a_logit"), np.ones(4, "float32")),
    **{"window": np.ones((1, 3, 4), "float32"), "conv_kernel": np.ones((4, 4), "float32")},
}


def refused_step(**changes):
    return lambda: ops.rg_lru_step(**{**STEP, **changes})


BYTES, SCALES, BLOCKS = np.ones((3, 4), "int8"), np.ones(4, "float32"), np.ones((2, 8), "float32")


def refused_weights(*arguments, **options):
    return lambda: ops.norm_quantized_linear(X, *arguments, **options)


IN_BLOCKS = {"bits": 4, "quantize_row": False}
REFUSED = {
    r"`kernels\[0\]` must be int8": refused_weights([KERNEL], [SCALES]),
    "`bits` must be 8 or 4": refused_weights([BYTES], [SCALES], bits=2),
    "`quantize_row` must be True or False": refused_weights([BYTES], [SCALES], quantize_row="no"),
    "must have 2 bytes a channel": refused_weights([BYTES], [SCALES], bits=4),
    "`kernel_scales` must be a list": refused_weights([BYTES], []),
    "`block_size` must be a positive": refused_weights([BYTES], [BLOCKS], block_size=0),
    "a `block_size` is for `bits=4`": refused_weights([BYTES], [BLOCKS], block_size=2),
    "`kernel_zeros` must have as many": refused_weights(
        [BYTES], [BLOCKS], block_size=2, **IN_BLOCKS
    ),
    "give their `block_size`": refused_weights(
        [BYTES], [BLOCKS], kernel_zeros=[BLOCKS.astype("int8")], **IN_BLOCKS
    ),
    "`kernel_scales` must have as many": refused_weights([BYTES], [None]),
    "must have 1 blocks": refused_weights(
        *([BYTES], [BLOCKS]), kernel_zeros=[BLOCKS.astype("int8")], block_size=4, **IN_BLOCKS
    ),
    "`window` must have the shape": refused_step(window=np.ones((1, 2, 4), "float32")),
    "`kernel_a` must have the shape": refused_step(
        **dict.fromkeys(("kernel_a", "kernel_x"), np.ones((3, 2, 2), "float32")),
        **dict.fromkeys(("bias_a", "bias_x"), np.ones((3, 2), "float32")),
    ),
    "list of one to three": lambda: ops.norm_linear(X, []),
    "matrices": lambda: ops.norm_linear(X, KERNEL),
    "must have the shape": lambda: ops.norm_linear(X, [KERNEL.T]),
    "`scale` is the norm.s: pass its `epsilon`": lambda: ops.norm_linear(X, [KERNEL], scale=X[0]),
    "`epsilon` must be a finite": lambda: ops.norm_linear(X, [KERNEL], epsilon=-1.0),
    "`gate` must be one of": lambda: ops.norm_linear(X, [KERNEL] * 2, gate="relu"),
    "or three, of which the last takes what the gate gives; got 1": lambda: ops.norm_linear(
        X, [KERNEL], gate="silu"
    ),
    r"`kernels\[1\]` is None": lambda: ops.norm_linear(X, [KERNEL, None]),
    "`kernels` must be a list .* got 4": lambda: ops.norm_linear(X, [KERNEL] * 4),
    "`biases` must be a list .* 1; got 2": lambda: ops.norm_linear(X, [KERNEL], biases=[None] * 2),
    "at least one channel": lambda: ops.norm_linear(X[:, :0], [KERNEL[:0]]),
    "between two kernels, so `kernels` must have two; got 3": refused_weights(
        [BYTES] * 3, [SCALES] * 3, gate="silu"
    ),
    r"`kernels\[2\]` must have the shape": lambda: ops.norm_linear(X, [KERNEL] * 3, gate="silu"),
    "one width": lambda: ops.norm_linear(X, [KERNEL, KERNEL[:, :2]], gate="silu"),
    "for one output; got 2": lambda: ops.norm_linear(X, [KERNEL] * 2, residual=X @ KERNEL),
    "`q` must have .* H K = 4 as in `memory`": lambda: ops.hgrn2_step(
        X, X, X, np.ones((2, 2, 2, 2), "f4")
    ),
    "`v` must have .* H V = 1 as in `memory`": lambda: ops.hgrn2_step(
        X, X, X, np.ones((2, 1, 3, 1), "f4")
    ),
    r"`conv_kernel` must .*: D should be 4": refused_step(conv_kernel=np.ones((3, 5), "float32")),
    "`conv_kernel` must have at least one": refused_step(conv_kernel=np.ones((0, 4), "float32")),
    "`kernel_a` must have the shape .* N C = 4": refused_step(
        kernel_a=np.ones((2, 3, 3), "float32")
    ),
    r"`kernels\[1\]` must have": lambda: ops.norm_linear(X, [KERNEL, KERNEL.T]),
    r"`biases\[1\]` must have": lambda: ops.norm_linear(X, [KERNEL] * 2, biases=[None, X]),
    "`token_kind` must be int8": lambda: ops.hgrn2_step(
        X, X, X, np.ones((2, 1, 3, 3), "f4"), token_kind=np.ones(2, "int32")
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words):
    with pytest.raises(ValueError, match=words):
        REFUSED[words]()


def test_in_a_graph():
    x = keras.Input((3,), batch_size=2)
    graph = keras.Model(x, ops.norm_linear(x, [KERNEL, KERNEL[:, :2]], epsilon=1e-5))
    found = graph(X)
    expected = ops.norm_linear(X, [KERNEL, KERNEL[:, :2]], epsilon=1e-5)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (a, b)), rtol=1e-6)
    (behind,) = ops.norm_linear(x, [KERNEL, KERNEL, KERNEL[0, :, None]], gate="silu")
    assert behind.shape == (2, 1)


def test_which_implementation_takes_lists():
    for arguments in (([KERNEL],), ([KERNEL, KERNEL], [None, KERNEL[0]])):
        choice = which_implementation("norm_linear", X, *arguments, epsilon=1e-5)
        assert choice.implementation in dispatch.IMPLEMENTATIONS["norm_linear"]
    choice = which_implementation(ops.norm_linear, np.tile(X, (9, 1)), kernels=[KERNEL] * 2)
    assert choice.implementation == PLAIN
    with pytest.raises(ValueError, match="`kernels` must be a list"):
        which_implementation("norm_linear", X)
    with pytest.raises(ValueError, match="takes no argument 'kernel'"):
        which_implementation("norm_linear", X, kernel=KERNEL)
