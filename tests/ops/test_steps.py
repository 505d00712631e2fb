"""Decoding steps: every implementation on this backend, judged by the definition, forward only.

`judge` defines the bound on errors, `steps` has the inputs.
"""

import functools

import keras
import numpy as np
import pytest

from keras_recurrent import dispatch
from keras_recurrent.backends.constants import PADDING, STARTS
from keras_recurrent.portable.hgrn2_delayed_step import current_memory
from tests.ops import judge, native
from tests.ops.judge import PLAIN, every_implementation, kernels, parametrize_kernels, run
from tests.ops.steps import CASES, DRAW, QUANTIZED, STATES, UPDATED_IN_PLACE, Case, draw

KERNELS = kernels(DRAW)
HAS_TRITON = any(implementation == "triton" for _, implementation in KERNELS)
every_kernel_with_states = parametrize_kernels([k for k in KERNELS if STATES[k[0]]])
on_torch = pytest.mark.skipif(PLAIN != "torch", reason="a property of torch")
with_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's interpreter or a GPU")

# The plain steps are one `keras.ops` function for all backends, so every case runs on torch; the
# sizes of the others are about Triton's tiles.
ON_ALL_BACKENDS = ["perceptron", "bfloat16, rows", "float64", "extreme"]
ON_ALL_BACKENDS += ["4 bits, blocks", "4 bits, columns", "three widths"]


def params_of(cases):
    nightly = set() if PLAIN == "torch" else cases.keys() - set(ON_ALL_BACKENDS)
    return [
        pytest.param(case, id=name, marks=pytest.mark.nightly if name in nightly else ())
        for name, case in cases.items()
    ]


def is_about_linear_layers(case):
    """Returns True for cases that differ from others in options of linear layers alone."""
    return case.gate is not None or case.activation is not None or case.next_norm


def is_nightly(kernel, index):
    """Interpreted kernels run in half of the cases, each case with half of the kernels."""
    return kernel[1] in judge.INTERPRETED and (KERNELS.index(kernel) // 2 + index) % 2 == 1


@functools.lru_cache(maxsize=len(CASES))
def define(operation, case):
    """Inputs and their definition, which the implementations of an operation share."""
    drawn = draw(operation, case)
    return drawn, judge.definition(operation, drawn)


def shrink(operation, case):
    """Limits sizes of which kernels have no tiles; the interpreter runs programs one by one."""
    if operation == "norm_quantized_linear":  # whose tiles depend on channels first
        return case._replace(widths=tuple(min(width, 400) for width in case.widths))
    if operation == "norm_linear":
        return case
    rows = case.rows if operation == "rg_lru_step" else min(case.rows, 5)
    return case._replace(rows=rows, channels=min(case.channels, 600))


def check(operation, implementation, case):
    drawn, defined = define(operation, shrink(operation, case))
    judge.check(operation, implementation, drawn, defined)


@pytest.mark.parametrize(
    ("operation", "implementation", "case"),
    [
        pytest.param(
            *kernel,
            *case.values,
            id=f"{'-'.join(kernel)}-{case.id}",
            marks=pytest.mark.nightly if is_nightly(kernel, i) else case.marks,
        )
        for kernel in KERNELS
        for i, case in enumerate(params_of(CASES))
        if "norm" in kernel[0] or not is_about_linear_layers(*case.values)
    ],
)
def test_step_matches_definition(operation, implementation, case):
    """An output or a new state of a decoding step is wrong."""
    check(operation, implementation, case)


@pytest.mark.parametrize("case", params_of(QUANTIZED))
@every_implementation("norm_quantized_linear")
def test_quantized_linear_layer_matches_definition(implementation, case):
    """Weights of 4 or 8 bits, or activations of 8 bits, are multiplied wrongly."""
    check("norm_quantized_linear", implementation, case)


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("quantize_row", [True, False])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@every_implementation("norm_quantized_linear")
def test_quantized_linear_layer_of_nonfinite_row_is_nonfinite(implementation, number, quantize_row):
    """NaN or infinity is rounded to an integer, which hides the error."""
    drawn = draw("norm_quantized_linear", Case(1, widths=(32,), quantize_row=quantize_row))
    drawn.tensors["x"][0, 3] = number
    output = run("norm_quantized_linear", implementation, drawn)["output 0"]
    assert not np.isfinite(output).any()


@pytest.mark.skipif(PLAIN != "torch", reason="arrays of other backends are no views")
@every_implementation("norm_quantized_linear")
def test_quantized_linear_layer_with_unaligned_weight_equals_aligned(implementation):
    """A kernel loads 16 bytes at once from a view of weights that is not aligned to 16 bytes."""
    layer = judge.function_of("norm_quantized_linear", implementation)
    weight = native.tensor(np.arange(9 * 24).reshape(9, 24) % 100, "int8")
    arguments = {
        "x": native.tensor(np.ones((1, 8)), "float32"),
        "kernel_scales": [native.tensor(np.ones(24), "float32")],
        "kernel_zeros": [None],
        "biases": [None],
    }
    aligned = {**arguments, "kernels": [weight[1:].clone()]}
    if reason := judge.unsupported_reason("norm_quantized_linear", implementation, aligned):
        pytest.skip(reason)
    (result,), (expected,) = layer(**arguments, kernels=[weight[1:]]), layer(**aligned)
    np.testing.assert_array_equal(result.cpu(), expected.cpu())


@every_kernel_with_states
def test_step_at_start_of_document_matches_definition(operation, implementation):
    """A kernel for one sequence reads the state of the previous document."""
    check(operation, implementation, Case(1, kinds=True, first_kind=STARTS))


@pytest.mark.parametrize(
    "case",
    [Case(3, kinds=True), Case(1, kinds=True, first_kind=PADDING)],
    ids=["three sequences", "one sequence"],
)
@every_kernel_with_states
def test_step_at_padding_keeps_the_states(operation, implementation, case):
    """Padding changes a state, or NaN at padding reaches a state or the output."""
    drawn, padding = draw(operation, case), case.rows - 1
    for name in {"q", "k", "f", "v", "x", "gate", "z", "bc", "dt"} & drawn.tensors.keys():
        shape = drawn.tensors[name].shape[1:]
        drawn.tensors[name][padding] = np.resize([np.nan, np.inf, -np.inf], shape)
    results = run(operation, implementation, drawn)
    for name in STATES[operation]:
        np.testing.assert_array_equal(results[name][padding], drawn.tensors[name][padding])
    assert np.isfinite(results["output 0"]).all()


@pytest.mark.once
@every_implementation("hgrn2_delayed_step")
def test_delayed_steps_match_steps_that_write_the_state(implementation):
    """Tokens are lost between two writes of the state, or slots are read before they are filled."""
    heads, keys, limit = 3, 6, 2
    memory = np.random.default_rng(0).normal(size=(3, heads, keys, 7))
    recent = np.full((3, limit, heads * (2 * keys + 7)), np.nan)
    delayed = {"memory": memory, "recent": recent, "count": np.zeros(3)}
    for t in range(2 * limit + 3):
        case = Case(3, widths=(16, 16), kinds=True, first_kind=t % 2)
        drawn = draw("hgrn2_step", case, seed=t)
        drawn = drawn._replace(tensors=drawn.tensors | {"memory": memory})
        expected = run("hgrn2_step", implementation, drawn)
        memory = expected["memory"]
        drawn = draw("hgrn2_delayed_step", case, seed=t)._replace(tensors=drawn.tensors | delayed)
        results = run("hgrn2_delayed_step", implementation, drawn)
        for name in ("output 0", "squares"):
            np.testing.assert_allclose(results[name], expected[name], rtol=1e-5, atol=1e-5)
        delayed = {name: results[name] for name in delayed}
    current = current_memory(**{n: native.tensor(t, drawn.dtypes[n]) for n, t in delayed.items()})
    np.testing.assert_allclose(native.to_numpy(current), memory, rtol=1e-5, atol=1e-5)
    assert len({*delayed["count"]}) > 1


@with_triton
def test_attention_step_of_programs_with_several_tiles_matches_definition(monkeypatch):
    """A tile of a long circular buffer belongs to no program, or a token to a wrong one."""
    module = judge.module_of("local_attention_step", "triton")
    monkeypatch.setattr(module, "MULTIPROCESSORS", 9)  # two programs for seven tiles
    check("local_attention_step", "triton", Case(9, channels=202, kinds=True))


@on_torch
@every_kernel_with_states
def test_step_updates_states_in_place_only_if_allowed(operation, implementation):
    """A state that the caller still needs is overwritten, or memory is copied needlessly."""
    from keras_recurrent.backends.torch._states import inplace_states

    drawn = draw(operation, Case(2))
    tensors = native.tensors(drawn)
    states = {name: tensors[name] for name in STATES[operation]}
    before = {name: state.clone() for name, state in states.items()}
    step = judge.function_of(operation, implementation)
    expected = step(**tensors, **drawn.options)
    for name, state in states.items():
        np.testing.assert_array_equal(state.cpu(), before[name].cpu())
    with inplace_states():
        results = step(**tensors, **drawn.options)
    for result, copied in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result.cpu(), copied.cpu())
    results = drawn.name_results(results)
    for name, state in states.items():
        is_updated = implementation == "triton" and name in UPDATED_IN_PLACE[operation]
        assert (results[name].data_ptr() == state.data_ptr()) == is_updated


@on_torch
@pytest.mark.parametrize("operation", [o for o, i in KERNELS if i == "triton"])
def test_triton_step_does_not_support_tensors_that_need_gradients(operation):
    """Training through a step that has no backward gives no gradients, without an error."""
    drawn = draw(operation, Case(1, widths=(16, 16)))
    tensors = native.tensors(drawn)
    next(iter(tensors.values())).requires_grad_()
    absent = {name: None for name in drawn.tensors if name not in tensors}
    arguments = {**tensors, **absent, **drawn.options}
    reason = judge.unsupported_reason(operation, "triton", arguments)
    assert "has no gradients" in reason


X = np.random.default_rng(0).normal(size=(3, 50)).astype("float32")
WITH_TIE, WITH_TWO_TOKENS = X.copy(), X.copy()
WITH_TIE[1, [7, 9]] = 100
WITH_TWO_TOKENS[1] = -np.inf
WITH_TWO_TOKENS[1, [7, 3]] = 100, 99
MASKS = np.packbits(X < 0, axis=1, bitorder="little")
TOKEN_IDS, SEGMENT, POSITION = np.array([[2, 0], [-1, 3], [0, 5]], "int32")
EMBEDDING = {"table": X, "token_ids": TOKEN_IDS}
CONTEXT = {"segment": SEGMENT, "position": POSITION}
# {name: operation, arrays, options, tolerance}
TOKEN_OPERATIONS = {
    "argmax": ("argmax", {"x": WITH_TIE}, {}, 0),
    "argmax of some tokens": ("argmax", {"x": WITH_TIE, "masks": MASKS}, {}, 0),
    "top_logits": ("top_logits", {"x": WITH_TWO_TOKENS}, {"count": 2}, 2e-6),
    "soft_cap": ("soft_cap", {"x": X}, {"cap": 0.5}, 1e-6),
    "embedding": ("embedding_step", EMBEDDING, {"scale": 2.0, "dtype": "float32"}, 0),
    "embedding with context": ("embedding_step", EMBEDDING | CONTEXT, {"dtype": "float32"}, 0),
}


@pytest.mark.parametrize("name", TOKEN_OPERATIONS)
def test_token_operation_matches_definition(name):
    """Sampling or embedding of tokens is wrong."""
    operation, arrays, options, tolerance = TOKEN_OPERATIONS[name]
    tensors = {name: keras.ops.convert_to_tensor(array) for name, array in arrays.items()}
    results = dispatch.run(operation, tensors | options)
    definition = getattr(judge.module_of(operation, "reference"), operation)
    expected = definition(**arrays, **options)
    for result, array in zip(*map(keras.tree.flatten, (results, expected)), strict=True):
        if array is not None:
            result = keras.ops.convert_to_numpy(result)
            np.testing.assert_allclose(result, array, rtol=0, atol=tolerance)
