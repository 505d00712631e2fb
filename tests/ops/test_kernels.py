"""Every operation over time in every implementation of this backend, against its definition.

How wrong they may be is said and decided in `judge`.
"""

import sys

import numpy as np
import pytest

from keras_recurrent import dispatch
from tests.ops import native
from tests.ops.cases import CASES, DRAW, Case, beside, draw, named, round_to
from tests.ops.judge import INTERPRETED, PLAIN, check, compare, kernel_of, kernels, reference, run

KERNELS = kernels(DRAW)
# JAX's interpreter of TPU kernels takes up to a minute a case, so one case shows them by default.
SLOW = {"pallas": pytest.mark.nightly}
every_kernel = pytest.mark.parametrize(
    ("operation", "implementation"), [pytest.param(*k, marks=SLOW.get(k[1], ())) for k in KERNELS]
)

# Beyond the plain implementations, whose cases take hundredths of a second, they are nightly.
every_plain_kernel = pytest.mark.parametrize(
    ("operation", "implementation"),
    [pytest.param(*k, marks=() if k[1] == PLAIN else pytest.mark.nightly) for k in KERNELS],
)


def shortened(case, implementation):
    """The interpreter computes a kernel's tiles one by one: few tiles for each kernel."""
    if implementation == "pallas":
        return case._replace(batch=1)
    if implementation not in INTERPRETED:
        return case
    return case._replace(length=min(case.length, 73), channels=min(case.channels, 64))


def marks_of(kernel, name):
    """Marks half of the cases nightly for kernels that are interpreted or compiled by XLA.

    JAX's interpreter runs one case. Each kernel runs in half of the cases, each case on half of the
    kernels, and all kernels in the case with documents, padding, a state and extreme decays.
    """
    if name == "prime sizes":
        return ()
    thinned = [k for k in KERNELS if k[1] in (*INTERPRETED, "jax", "tensorflow")]
    always = name == "one token, state" and kernel[1] not in INTERPRETED
    if kernel in thinned and not always and (thinned.index(kernel) + [*CASES].index(name)) % 2:
        return pytest.mark.nightly
    return SLOW.get(kernel[1], ())


every_kernel_in_every_case = pytest.mark.parametrize(
    ("operation", "implementation", "case"),
    [
        pytest.param(
            *kernel,
            shortened(case, kernel[1]),
            id=f"{'-'.join(kernel)}-{name}",
            marks=marks_of(kernel, name),
        )
        for kernel in KERNELS
        for name, case in CASES.items()
    ],
)


def every_implementation(operation):
    """Those of one operation."""
    names = [implementation for of, implementation in KERNELS if of == operation]
    names = [pytest.param(name, marks=SLOW.get(name, ())) for name in names]
    return pytest.mark.parametrize("implementation", names)


def test_all_operations_have_a_plain_implementation():
    missing = [
        name for name, row in dispatch.IMPLEMENTATIONS.items() if isinstance(row[PLAIN], str)
    ]
    assert not missing


@pytest.mark.skipif(PLAIN != "jax", reason="other backends have one form")
def test_chunks_of_gated_linear_attention_on_jax(monkeypatch):
    """On CPUs a loop over tokens computes the small heads of the cases, never the chunks."""
    row = dispatch.IMPLEMENTATIONS["gated_linear_attention"]
    traced_anew = row["jax"].replace_passes(row["jax"].forward, row["jax"].backward)
    module = sys.modules["keras_recurrent.backends.jax.gated_linear_attention"]
    monkeypatch.setattr(module, "LARGEST_STATE_OF_TOKEN_LOOP", 0)
    monkeypatch.setitem(row, "jax", traced_anew)
    check("gated_linear_attention", "jax", draw("gated_linear_attention", CASES["prime sizes"]))


@every_kernel_in_every_case
def test_forward_and_gradients(operation, implementation, case):
    with native.precision(case.dtype):
        check(operation, implementation, draw(operation, case))


STEPS = {
    "bare": Case(2, 1, 5, activation=None),
    "state": Case(3, 1, 5, state=True),
    "kinds": Case(5, 1, 4, kinds=True, tied=True),
    "all, extreme": Case(9, 1, 5, kinds=True, state=True, decays="extreme"),
    "bfloat16": Case(3, 1, 5, "bfloat16", kinds=True, state=True),
    "float64": Case(3, 1, 5, "float64", kinds=True, state=True),
}


@pytest.mark.nightly
@pytest.mark.skipif(PLAIN != "torch", reason="elsewhere gradients make no difference")
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
@every_kernel
def test_one_token_without_gradients(operation, implementation, case, monkeypatch):
    gradients = native.gradients

    def forward_without_gradients(call, arguments, integers, *others):
        _, _, found = gradients(call, arguments, integers, *others)
        with native.torch.no_grad():
            return *call(arguments, integers), found

    monkeypatch.setattr(native, "gradients", forward_without_gradients)
    check(operation, implementation, draw(operation, case))


@pytest.mark.skipif(PLAIN != "torch", reason="elsewhere zeros stand for missing gradients")
@pytest.mark.parametrize(
    ("operation", "implementation", "state", "used"),
    [
        pytest.param(
            *kernel,
            state,
            used,
            id=f"{'-'.join(kernel)}-{'from a state' if state else 'from nothing'}-{used}",
            marks=pytest.mark.nightly
            if kernel[1] in INTERPRETED and state != (used == "state")
            else SLOW.get(kernel[1], ()),
        )
        for kernel in KERNELS
        for state in (False, True)
        for used in ("output", "state")
    ],
)
def test_results_that_nothing_depends_on(operation, implementation, state, used, monkeypatch):
    drawn = draw(operation, Case(2, 19, 3, kinds=True, state=state))
    if used == "output":
        for gradient in named("", drawn.d_final_state).values():
            gradient[:] = 0
    else:
        drawn.d_output[:] = 0
    chosen = slice(1) if used == "output" else slice(1, None)

    def gradients_of_chosen(call, arguments, integers, cotangents, same=None):
        for a in arguments.values():
            a.requires_grad_()
        outputs, aside = call(arguments, integers)
        found = native.torch.autograd.grad(
            outputs[chosen],
            list(arguments.values()),
            cotangents[chosen],
            allow_unused=True,
            materialize_grads=True,
        )
        return outputs, aside, dict(zip(arguments, found, strict=True))

    monkeypatch.setattr(native, "gradients", gradients_of_chosen)
    check(operation, implementation, drawn)


@pytest.mark.skipif(PLAIN != "torch", reason="elsewhere zeros stand for missing gradients")
@every_kernel
def test_no_gradient_arrives_at_all(operation, implementation):
    """Autograd calls an operation's gradient where one behind it returned none, too."""
    drawn = draw(operation, Case(2, 19, 3))
    tensors = {
        name: native.tensor(t, drawn.dtypes[name]).requires_grad_()
        for name, t in drawn.tensors.items()
    }
    output, _ = kernel_of(operation, implementation)(**tensors, **drawn.options)
    native.ends(output).sum().backward()
    assert not any(t.grad.any() for t in tensors.values() if t.grad is not None)


@pytest.mark.parametrize("operation", ["gated_linear_attention", "lightning_attention"])
def test_several_groups_of_chunks(operation):
    case = Case(1, 1031, 64, kinds=True, decays="near one")
    check(operation, PLAIN, draw(operation, case))


@pytest.mark.parametrize(
    "operation", ["linear_scan", "complex_linear_scan", "rg_lru", "causal_conv1d"]
)
def test_several_chunks_of_time(operation):
    case = Case(2, 199, 600, kinds=True, state=True)
    check(operation, PLAIN, draw(operation, case))


@every_plain_kernel
def test_padding_may_hold_anything(operation, implementation):
    drawn = draw(operation, Case(2, 19, 3, kinds=True, state=True))
    padding = drawn.token_kind == 2
    poisoned = {
        name: np.where(beside(t, padding), np.resize([np.nan, np.inf, -np.inf], t.shape), t)
        if t.ndim >= 3
        else t
        for name, t in drawn.tensors.items()
    }
    clean = run(operation, implementation, drawn)
    poisoned = run(operation, implementation, drawn._replace(tensors=poisoned))
    for name, expected in clean.items():
        if name == "output":
            shown = beside(expected, ~padding)
            expected, poisoned[name] = (np.where(shown, r, 0) for r in (expected, poisoned[name]))
        np.testing.assert_array_equal(poisoned[name], expected, err_msg=name)
        if name.startswith("gradient") and expected.shape[:2] == padding.shape:
            assert not np.any(np.where(beside(expected, padding), expected, 0)), name


linear_attention = pytest.mark.parametrize(
    ("operation", "implementation"),
    [
        pytest.param(*kernel, marks=SLOW.get(kernel[1], ()))
        for kernel in KERNELS
        if kernel[0] in ("gated_linear_attention", "lightning_attention")
    ],
)


@linear_attention
def test_gradients_at_padding_may_hold_anything(operation, implementation):
    """Whoever multiplies the output by NaN there, and then leaves it out, sends back 0 * NaN."""
    drawn = draw(operation, Case(1, 70, 3, kinds=True, state=True))
    padding = beside(drawn.d_output, drawn.token_kind == 2)
    found = [
        run(
            operation, implementation, drawn._replace(d_output=np.where(padding, x, drawn.d_output))
        )
        for x in (0.0, np.nan)
    ]
    for name, expected in found[0].items():
        np.testing.assert_array_equal(found[1][name], expected, err_msg=name)


@linear_attention
def test_a_state_that_has_all_but_decayed(operation, implementation):
    """Without keys it is all there is: 1e-26 of a state is not 0."""
    drawn = draw(operation, Case(1, 4, 3, state=True))
    drawn.tensors["k"][:] = 0
    drawn.tensors["log_f" if operation.startswith("gated") else "log_decay"][:] = -15
    results = run(operation, implementation, drawn)
    for name, truth in reference(operation, drawn, "float64").items():
        if name in ("output", "final_state", "gradient of q", "gradient of initial_state"):
            last = truth[:, -1] if name in ("output", "gradient of q") else truth
            found = results[name][:, -1] if name in ("output", "gradient of q") else results[name]
            np.testing.assert_allclose(found, last, rtol=1e-5, atol=1e-31, err_msg=name)


# {tensors: (first, end) of the outputs that their token 10 of 24 may reach}. Token 13 starts a
# document, and a window is 6.
LATER, ANY = (10, 24), (0, 24)
REACH = {
    "linear_scan": {("x", "log_a"): LATER},
    "complex_linear_scan": {("x", "log_a", "phase"): LATER},
    "rg_lru": {("x", "gate_a", "gate_x"): LATER},
    "causal_conv1d": {("x",): (10, 13)},
    "gated_linear_attention": {("q",): (10, 11), ("k", "v", "log_f"): ANY},
    "lightning_attention": {("q",): (10, 11), ("k", "v"): ANY},
    "sliding_window_attention": {("q",): (10, 11), ("k",): (10, 13), ("v",): ANY},
}


@every_kernel
def test_how_far_what_is_not_finite_reaches(operation, implementation):
    """As the operations' docstrings have it, and never into another row."""
    drawn = draw(operation, Case(2, 24, 3, activation=None))
    drawn = drawn._replace(token_kind=np.zeros((2, 24), "int8"))
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
        for apart in (slice(0, first), slice(end, None)):
            found, expected = (r["output"][0, apart] for r in (results, clean))
            np.testing.assert_array_equal(found, expected, err_msg=str(names))


@every_kernel
def test_rows_of_padding_alone(operation, implementation):
    drawn = draw(operation, Case(2, 9, 3, kinds=True, state=True))
    drawn.token_kind[0] = 2
    drawn.d_output[0] = 0
    results = run(operation, implementation, drawn)
    for name, before in named("final_state", drawn.initial_state).items():
        np.testing.assert_array_equal(results[name][0], before[0], err_msg=name)
    for name, gradient in named("gradient of initial_state", drawn.d_final_state).items():
        np.testing.assert_array_equal(results[name][0], gradient[0], err_msg=name)


@pytest.mark.parametrize(
    ("operation", "implementation"),
    [
        pytest.param(*kernel, marks=() if kernel == ("linear_scan", PLAIN) else pytest.mark.nightly)
        for kernel in KERNELS
    ],
)
def test_the_check_sees_a_wrong_result(operation, implementation):
    drawn = draw(operation, CASES["prime sizes"])
    results = run(operation, implementation, drawn)
    for name in results:
        off = np.where(results[name], results[name] * (1 + 1e-4), 1e-4)
        broken = {**results, name: off}
        with pytest.raises(AssertionError, match=name):
            compare(operation, implementation, drawn, broken)


@every_implementation("causal_conv1d")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_silu_is_differentiated_exactly_where_it_is_nearly_its_argument(implementation, dtype):
    drawn = draw("causal_conv1d", Case(2, 40, 8, dtype))
    x, kernel, bias = drawn.tensors.values()
    x[:] = round_to(dtype, np.linspace(5, 36, x.size).reshape(x.shape))
    kernel[:], bias[:] = 0, 0
    kernel[-1] = drawn.d_output[:] = 1
    with native.precision(dtype):
        check("causal_conv1d", implementation, drawn)


@pytest.mark.parametrize("operation", ["linear_scan", "complex_linear_scan", "rg_lru"])
def test_gradients_of_output_and_state_that_all_but_cancel(operation):
    """They are added first, and what is left is multiplied with the decay: not each of them."""
    drawn = draw(operation, Case(1, 1, 500, state=True))
    drawn.d_final_state[:] = round_to("float32", -drawn.d_output[:, 0] * (1 + 2.0**-12))
    check(operation, PLAIN, drawn)


@every_implementation("causal_conv1d")
def test_rows_longer_than_several_programs_go_through(implementation):
    check("causal_conv1d", implementation, draw("causal_conv1d", Case(1, 900, 20, kinds=True)))


def test_gradients_that_are_sums_over_many_tokens():
    """They lose fewer than four units in the last place, where adding one by one loses hundreds."""
    drawn = draw("causal_conv1d", Case(1, 5000, 3, activation=None))
    drawn.d_output[:] = round_to("float32", 0.1)
    found = run("causal_conv1d", PLAIN, drawn)["gradient of bias"]
    np.testing.assert_allclose(found, 5000 * round_to("float32", 0.1), rtol=4 * 2.0**-24)
