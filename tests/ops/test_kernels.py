"""Operations over time: every implementation on this backend, judged by the definition.

`judge` defines the bound on errors, `cases` has the inputs.
"""

import numpy as np
import pytest

from keras_recurrent import dispatch
from tests.ops import native, small
from tests.ops.cases import CASES, DRAW, Case, align, draw, flatten, round_to
from tests.ops.judge import (
    INTERPRETED,
    PLAIN,
    SLOW,
    check,
    every_implementation,
    kernel_of,
    kernels,
    parametrize_kernels,
    reference,
    run,
)

KERNELS = kernels(DRAW)
every_kernel = parametrize_kernels(KERNELS)
# Cases of plain implementations take hundredths of a second; other kernels are nightly.
every_plain_kernel = parametrize_kernels(KERNELS, nightly=lambda kernel: kernel[1] != PLAIN)
LINEAR_ATTENTION = ("gated_linear_attention", "lightning_attention", "scalar_decay_attention")
linear_attention = parametrize_kernels(
    [k for k in KERNELS if k[0] in LINEAR_ATTENTION], nightly=lambda kernel: kernel[1] != PLAIN
)
on_torch = pytest.mark.skipif(PLAIN != "torch", reason="other backends pass zeros as gradients")
# Tests share the programs that JAX compiles for this case.
SMALL = Case(2, 19, 3, kinds=True, state=True, heads=(2, 1))


def shorten(operation, implementation, case):
    """Limits the number of tiles, which interpreters compute one after another."""
    if implementation == "pallas":
        # A block has 128 tokens or more: fewer tokens of one block are as good.
        length = min(case.length, 41) if case.length < 128 else case.length
        return case._replace(batch=1, length=length, heads=(2, 1))
    if implementation not in INTERPRETED:
        return case
    # Of linear attention, 16 tokens in 32 bits are a chunk.
    limit = 41 if operation in LINEAR_ATTENTION and case.dtype == "float32" else 73
    heads = case.heads if case is CASES["prime sizes"] else (2, 1)
    sizes = {"length": min(case.length, limit), "channels": min(case.channels, 64)}
    return case._replace(**sizes, heads=heads)


def is_nightly(kernel, name):
    """Half of the cases are nightly for kernels that are interpreted, or compiled by XLA.

    By default each such kernel runs in half of the cases, each case with half of the kernels, and
    all kernels in the case with documents, padding, a state and extreme decays.
    """
    if name == "prime sizes":
        return False
    halved = [k for k in KERNELS if k[1] in (*INTERPRETED, "jax", "tensorflow")]
    always = name == "one token, state" and kernel[1] not in INTERPRETED
    if kernel in halved and not always and (halved.index(kernel) + [*CASES].index(name)) % 2:
        return True
    return kernel[1] in SLOW


def test_every_operation_has_a_plain_implementation():
    rows = dispatch.IMPLEMENTATIONS.items()
    assert not [operation for operation, row in rows if isinstance(row[PLAIN], str)]


@pytest.mark.parametrize(
    ("operation", "implementation", "case"),
    [
        pytest.param(
            *kernel,
            shorten(*kernel, case),
            id=f"{'-'.join(kernel)}-{name}",
            marks=pytest.mark.nightly if is_nightly(kernel, name) else (),
        )
        for kernel in KERNELS
        for name, case in CASES.items()
    ],
)
def test_kernel_matches_definition(operation, implementation, case):
    """Results or gradients of a kernel are wrong."""
    check(operation, implementation, draw(operation, case))


@pytest.mark.skipif(PLAIN != "jax", reason="other backends have one form")
def test_jax_gated_linear_attention_in_chunks_matches_definition(monkeypatch):
    """The chunks are wrong: on CPUs, a loop over tokens computes the small heads of the cases."""
    row = dispatch.IMPLEMENTATIONS["gated_linear_attention"]
    retraced = row["jax"].replace_passes(row["jax"].forward, row["jax"].backward)
    monkeypatch.setattr(dispatch._time_groups, "LARGEST_STATE_OF_TOKEN_LOOP", 0)
    monkeypatch.setitem(row, "jax", retraced)
    check("gated_linear_attention", "jax", draw("gated_linear_attention", CASES["prime sizes"]))


SINGLE_TOKENS = {
    "no state": Case(2, 1, 5, activation=None),
    "state": Case(3, 1, 5, state=True),
    "kinds": Case(5, 1, 4, kinds=True, tied=True),
    "state, kinds, extreme": Case(9, 1, 5, kinds=True, state=True, decays="extreme"),
    "bfloat16": Case(3, 1, 5, "bfloat16", kinds=True, state=True),
    "float64": Case(3, 1, 5, "float64", kinds=True, state=True),
}


@pytest.fixture
def forward_without_gradients(monkeypatch):
    """Returns a function after which torch computes results in `no_grad`."""
    gradients = native.gradients

    def compute(call, floats, others, *further):
        _, _, found = gradients(call, floats, others, *further)
        with native.torch.no_grad():
            return *call(floats, others), found

    return lambda: monkeypatch.setattr(native, "gradients", compute)


@pytest.mark.nightly
@pytest.mark.skipif(PLAIN != "torch", reason="on other backends, gradients make no difference")
@pytest.mark.parametrize("case", SINGLE_TOKENS.values(), ids=SINGLE_TOKENS)
@every_kernel
def test_single_token_without_gradients_matches_definition(
    operation, implementation, case, forward_without_gradients
):
    """The code for a token that needs no gradients gives other results than the kernels."""
    forward_without_gradients()
    check(operation, implementation, draw(operation, case))


@on_torch
@pytest.mark.parametrize(
    ("operation", "implementation", "state", "used"),
    [
        pytest.param(
            *kernel,
            state,
            used,
            id=f"{'-'.join(kernel)}-{'from a state' if state else 'no state'}-{used}",
            marks=pytest.mark.nightly if kernel[1] in (*SLOW, *INTERPRETED) else (),
        )
        for kernel in KERNELS
        for state in (False, True)
        for used in ("output", "state")
    ],
)
def test_gradients_of_one_result_alone_match_definition(
    operation, implementation, state, used, monkeypatch
):
    """Gradients are wrong if autograd passes None for the output, or for the final state."""
    drawn = draw(operation, Case(2, 19, 3, kinds=True, state=state))
    for name, d_result in drawn.cotangents.items():
        if (name == "output") != (used == "output"):
            d_result[:] = 0
    chosen = slice(1) if used == "output" else slice(1, None)

    def gradients_of_chosen(call, floats, others, cotangents, key=None):
        leaves = [t.requires_grad_() for t in floats.values()]
        outputs, further = call(floats, others)
        unused = {"allow_unused": True, "materialize_grads": True}
        found = native.torch.autograd.grad(outputs[chosen], leaves, cotangents[chosen], **unused)
        return outputs, further, dict(zip(floats, found, strict=True))

    monkeypatch.setattr(native, "gradients", gradients_of_chosen)
    check(operation, implementation, drawn)


@on_torch
@parametrize_kernels([*KERNELS, *kernels(["linear_crossentropy"])])
def test_backward_without_any_gradient_gives_zeros(operation, implementation):
    """The backward of a kernel fails if a later function returned no gradient at all."""
    drawn = small.draw(operation)
    tensors = native.tensors(drawn)
    leaves = [tensors[name].requires_grad_() for name in drawn.differentiated]
    output, _ = kernel_of(operation, implementation)(**tensors, **drawn.options)
    assert output.requires_grad
    native.copy_without_gradient(output).sum().backward()
    assert not any(t.grad.any() for t in leaves if t.grad is not None)


SEVERAL_CHUNKS = {
    **dict.fromkeys(
        LINEAR_ATTENTION, Case(1, 1031, 64, kinds=True, decays="near one", heads=(2, 1))
    ),
    **dict.fromkeys(
        ("linear_scan", "complex_linear_scan", "rg_lru", "causal_conv1d"),
        # torch makes chunks of a number of elements, other backends of a number of tokens.
        Case(2, 199, 600 if PLAIN == "torch" else 60, kinds=True, state=True),
    ),
}


@pytest.mark.parametrize(("operation", "case"), SEVERAL_CHUNKS.items(), ids=SEVERAL_CHUNKS)
def test_plain_kernel_in_several_chunks_matches_definition(operation, case):
    """A state is lost or changed between two chunks of a long sequence."""
    check(operation, PLAIN, draw(operation, case))


@every_implementation("causal_conv1d")
def test_convolution_of_several_programs_matches_definition(implementation):
    """A token that two programs of a convolution need is wrong."""
    check("causal_conv1d", implementation, draw("causal_conv1d", Case(1, 700, 20, kinds=True)))


@pytest.mark.parametrize("length", [1, 19])
@every_plain_kernel
def test_values_at_padding_change_nothing(
    operation, implementation, length, forward_without_gradients
):
    """NaN or infinity at padding reaches a result, or padding gets a gradient."""
    if length == 1 and PLAIN == "torch":
        forward_without_gradients()
    drawn = draw(operation, SMALL if length == 19 else SMALL._replace(batch=21, length=1))
    assert drawn.padding.any()
    poisoned = {
        name: np.where(align(drawn.padding, t), np.resize([np.nan, np.inf, -np.inf], t.shape), t)
        if t.ndim >= 3
        else t
        for name, t in drawn.tensors.items()
    }
    clean = run(operation, implementation, drawn)
    results = run(operation, implementation, drawn._replace(tensors=poisoned))
    for name, expected in clean.items():
        result = results[name]
        if name == "output":
            assert np.isfinite(result).all()
            padding = align(drawn.padding, expected)
            expected, result = (np.where(padding, 0, r) for r in (expected, result))
        np.testing.assert_array_equal(result, expected, err_msg=name)
        if name.startswith("gradient") and expected.shape[:2] == drawn.padding.shape:
            assert not expected[drawn.padding].any(), name


@linear_attention
def test_gradients_at_padding_change_nothing(operation, implementation):
    """NaN in the gradient of an output at padding, such as 0 · NaN of a mask, reaches a result."""
    drawn = draw(operation, SMALL)
    zero, nan = (
        run(operation, implementation, drawn._replace(d_output=np.where(padding, x, d_output)))
        for padding, d_output in [(align(drawn.padding, drawn.d_output), drawn.d_output)]
        for x in (0.0, np.nan)
    )
    for name, expected in zero.items():
        np.testing.assert_array_equal(nan[name], expected, err_msg=name)


@linear_attention
def test_linear_attention_with_nearly_decayed_state_keeps_digits(operation, implementation):
    """A state of 1e-26 is rounded to 0, although without keys the output has no other term."""
    drawn = draw(operation, Case(1, 4, 3, state=True))
    drawn.tensors["k"][:] = 0
    drawn.tensors["log_f" if operation.startswith("gated") else "log_decay"][:] = -15
    results, truth = run(operation, implementation, drawn), reference(operation, drawn, "float64")
    for name in ("output", "final_state", "gradient of q", "gradient of initial_state"):
        last = -1 if name in ("output", "gradient of q") else slice(None)
        result, expected = results[name][:, last], truth[name][:, last]
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-31, err_msg=name)


# {tensors: first and last + 1 of the outputs that may depend on their token 10 of 19}. Token 13
# starts a document; the window has 6 tokens.
LATER, ALL = (10, 19), (0, 19)
REACH = {
    "linear_scan": {("x", "log_a"): LATER},
    "complex_linear_scan": {("x", "log_a", "phase"): LATER},
    "rg_lru": {("x", "gate_a", "gate_x"): LATER},
    "causal_conv1d": {("x",): (10, 13)},
    "gated_linear_attention": {("q",): (10, 11), ("k", "v", "log_f"): ALL},
    "lightning_attention": {("q",): (10, 11), ("k", "v"): ALL},
    "scalar_decay_attention": {("q",): (10, 11), ("k", "v", "log_decay"): ALL},
    "sliding_window_attention": {("q",): (10, 11), ("k",): (10, 13), ("v",): ALL},
}


@every_kernel
def test_nan_reaches_no_other_sequence_and_only_documented_tokens(operation, implementation):
    """NaN spreads farther than the docstring of an operation says."""
    drawn = draw(operation, SMALL)
    drawn.token_kind[:] = 0
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
        for unreached in (slice(0, first), slice(end, None)):
            output, expected = (r["output"][0, unreached] for r in (results, clean))
            np.testing.assert_array_equal(output, expected, err_msg=str(names))


@every_kernel
def test_sequence_of_padding_alone_keeps_its_state(operation, implementation):
    """Padding changes the state, or the gradient of the final state on its way to the initial."""
    drawn = draw(operation, SMALL)
    drawn.token_kind[0] = 2
    drawn.d_output[0] = 0
    results = run(operation, implementation, drawn)
    kept = {"final_state": drawn.initial_state, "gradient of initial_state": drawn.d_final_state}
    for name, expected in flatten(kept).items():
        np.testing.assert_array_equal(results[name][0], expected[0], err_msg=name)


@every_implementation("causal_conv1d")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_silu_gradient_of_large_arguments_is_exact(implementation, dtype):
    """The derivative of SiLU loses digits where SiLU is nearly the identity."""
    drawn = draw("causal_conv1d", Case(2, 40, 8, dtype))
    x, kernel, bias = drawn.tensors.values()
    x[:] = round_to(dtype, np.linspace(5, 36, x.size).reshape(x.shape))
    kernel[:], bias[:] = 0, 0
    kernel[-1] = drawn.d_output[:] = 1
    check("causal_conv1d", implementation, drawn)


@pytest.mark.parametrize("operation", ["linear_scan", "complex_linear_scan", "rg_lru"])
def test_scan_gradients_of_output_and_state_that_nearly_cancel_keep_digits(operation):
    """The gradients are multiplied by the decay before they are added, which loses digits."""
    drawn = draw(operation, Case(1, 1, 500, state=True))
    drawn.d_final_state[:] = round_to("float32", -drawn.d_output[:, 0] * (1 + 2.0**-12))
    check(operation, PLAIN, drawn)


def test_convolution_bias_gradient_of_many_tokens_keeps_digits():
    """A sum over tokens loses hundreds of units in the last place, as a sequential sum does."""
    drawn = draw("causal_conv1d", Case(1, 5000, 3, activation=None))
    drawn.d_output[:] = round_to("float32", 0.1)
    found = run("causal_conv1d", PLAIN, drawn)["gradient of bias"]
    np.testing.assert_allclose(found, 5000 * round_to("float32", 0.1), rtol=4 * 2.0**-24)
