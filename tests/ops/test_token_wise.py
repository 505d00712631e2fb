"""Operations on each token: every implementation on this backend, judged by the definition.

`judge` defines the bound on errors, `token_wise` has the inputs.
"""

import keras
import numpy as np
import pytest

from keras_recurrent import ops
from tests.ops import native
from tests.ops.cases import round_to, unit
from tests.ops.judge import (
    INTERPRETED,
    PLAIN,
    check,
    compare,
    every_implementation,
    function_of,
    kernels,
    module_of,
    parametrize_kernels,
    reference,
    run,
)
from tests.ops.token_wise import CASES, DRAW, Case, draw

KERNELS = kernels(DRAW)
every_kernel = parametrize_kernels(KERNELS)
every_activation = pytest.mark.parametrize("activation", ["silu", "gelu"])
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])
on_jax = pytest.mark.skipif(PLAIN != "jax", reason="a property of JAX")


def draw_values(operation, case, d_output=None, **values):
    """Random inputs with some tensors replaced by values, rounded to their dtypes."""
    drawn = draw(operation, case)
    for name, value in values.items():
        drawn.tensors[name][:] = round_to(drawn.dtypes[name], value)
    if d_output is not None:
        drawn.d_output[:] = d_output
    return drawn


@every_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_matches_definition(operation, implementation, case):
    """Results or gradients of a kernel are wrong."""
    if operation == "token_crossentropy" and implementation in INTERPRETED:
        # The interpreter runs one program for each token.
        case = case._replace(shape=(min(case.shape[0], 61), *case.shape[1:]))
    check(operation, implementation, draw(operation, case))


def spread(first, last):
    return np.linspace(first, last, 160).reshape(4, 40)


# {name: operation, case, values of its tensors}
HARD_INPUTS = {
    f"{activation} gates that are nearly open, {dtype}": (
        "gated_linear_unit",
        Case((4, 40), dtype, activation=activation),
        {"gate": spread(1, last), "x": np.ones(40)},
    )
    for dtype in ("float32", "float64")
    for activation, last in (("silu", 36), ("gelu", 6))
}
HARD_INPUTS |= {
    f"forget gates of {first} to {last}, {dtype}": (
        "log_forget_gate",
        Case((4, 40), dtype, parameter=False),
        {"logits": spread(first, last)},
    )
    for dtype in ("float32", "float64")
    for first, last in ((-30, -1), (14.56, 14.86))
}


@pytest.mark.parametrize(
    ("implementation", "name"),
    [(i, name) for name, (o, *_) in HARD_INPUTS.items() for of, i in KERNELS if of == o],
)
def test_gates_near_their_limits_match_definition(implementation, name):
    """A gate or its derivative loses the digits by which it differs from its limit."""
    operation, case, values = HARD_INPUTS[name]
    check(operation, implementation, draw_values(operation, case, d_output=1, **values))


# {operation: {tensor with one NaN: {result: part of it that is NaN}}}; an entry for inf differs.
# Gradients of weights are sums over tokens. "element" is one channel of one token.
REACH = {
    "rms_norm": {
        "x": {"output": "token", "gradient of x": "token", "gradient of scale": "all"},
        "x, inf": {"output": "element", "gradient of x": "token", "gradient of scale": "channel"},
        "scale": {"output": "channel", "gradient of x": "all"},
        "d_output": {"gradient of x": "token", "gradient of scale": "channel"},
    },
    "gated_linear_unit": {
        "gate": {"output": "element", "gradient of gate": "element", "gradient of x": "element"},
        "x": {"output": "element", "gradient of gate": "element"},
        "d_output": {"gradient of gate": "element", "gradient of x": "element"},
    },
    "log_forget_gate": {
        "logits": {
            "output": "element",
            "gradient of logits": "element",
            "gradient of lower_bound": "channel",
        },
        "logits, inf": {},
        "lower_bound": {
            "output": "channel",
            "gradient of logits": "channel",
            "gradient of lower_bound": "channel",
        },
        "d_output": {"gradient of logits": "element", "gradient of lower_bound": "channel"},
    },
    "token_crossentropy": {
        "logits": {"output": "token", "gradient of logits": "token"},
        "d_output": {"gradient of logits": "token"},
    },
}
TOKEN, CHANNEL = 1, 7  # of 4 tokens and 50 channels


def reached(shape, reach):
    """A mask of the part of a result: "element", "token", "channel", "all", or None."""
    index = [slice(None)] * len(shape)
    if shape[0] == 4 and reach in ("element", "token"):
        index[0] = TOKEN
    if shape[-1] == 50 and reach in ("element", "channel"):
        index[-1] = CHANNEL
    mask = np.zeros(shape, "bool")
    mask[tuple(index)] = reach is not None
    return mask


@every_kernel
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_nonfinite_number_reaches_only_documented_results(operation, implementation, number):
    """NaN or infinity spreads farther than the docstring of an operation says, or NaN is lost."""
    reaches = REACH[operation]
    for name in [name for name in reaches if "inf" not in name]:
        if np.isinf(number) and name == "lower_bound":
            continue  # log β is at most 0, and may be -inf
        reach = reaches[name]
        if np.isinf(number):
            reach = reaches.get(f"{name}, inf", reach)
        drawn = draw(operation, Case((4, 50)))
        array = drawn.d_output if name == "d_output" else drawn.tensors[name]
        if array.shape[0] == 4:
            array[(TOKEN, CHANNEL)[: array.ndim]] = number
        else:
            array[..., CHANNEL] = number
        with np.errstate(all="ignore"):  # of the interpreter
            results = run(operation, implementation, drawn)
        for result_name, result in results.items():
            lost, allowed = ~np.isfinite(result), reached(result.shape, reach.get(result_name))
            message = f"{result_name}, {number} in {name}"
            assert not (lost & ~allowed).any(), message
            if np.isnan(number):
                assert (lost == allowed).all(), message


@every_implementation("rms_norm")
def test_rms_norm_without_epsilon_of_rows_of_any_size_is_finite(implementation):
    """Sums of squares overflow or underflow: results are NaN, or wrong within float32's range."""
    sizes = np.array([1e-17, 1e-13, 1, 1e13, 1e18, 0, 1e-30, 1e30])[:, None]
    drawn = draw("rms_norm", Case((8, 12)))._replace(options={"epsilon": 0.0})
    drawn.tensors["x"][:] = round_to("float32", drawn.tensors["x"] * sizes)
    # Sums of squares of the first five rows are numbers of float32.
    representable = {n: t[:5] if n != "scale" else t for n, t in drawn.tensors.items()}
    representable = drawn._replace(tensors=representable, d_output=drawn.d_output[:5])
    drawn.d_output[5:] = 0
    with np.errstate(all="ignore"):  # of the interpreter
        results = run("rms_norm", implementation, drawn)
        drawn.d_output[5:] = 1
        others = run("rms_norm", implementation, drawn)
    assert all(np.isfinite(r).all() for r in (*results.values(), *others.values()))
    results = {n: r if n == "gradient of scale" else r[:5] for n, r in results.items()}
    assert_close_to_truth("rms_norm", representable, results)


@every_implementation("rms_norm")
@pytest.mark.parametrize("width", [12, 3000])
@pytest.mark.parametrize("epsilon", [0.0, 1e-35, 1e-6])
def test_rms_norm_of_any_mean_square_is_exact(implementation, width, epsilon):
    """Squares overflow or underflow although their mean is a number of float32."""
    drawn = draw("rms_norm", Case((6, width), parameter=False))
    x = drawn.tensors["x"]
    x[:3] /= np.sqrt(np.mean(x[:3] ** 2, axis=-1, keepdims=True))
    x[3:] = np.where(np.arange(width) == 1, np.sqrt(width), 0)  # One element makes the mean.
    x[:] = round_to("float32", x * np.array([1.1 * 2.0**-63, 1, 1.8e19] * 2)[:, None])
    drawn = drawn._replace(options={"epsilon": epsilon})
    assert_close_to_truth("rms_norm", drawn, run("rms_norm", implementation, drawn))


def assert_close_to_truth(operation, drawn, results):
    """Compares each row with the definition, relative to its largest element."""
    for name, truth in reference(operation, drawn, "float64").items():
        size = np.abs(truth).max(-1, keepdims=True)
        np.testing.assert_allclose(results[name] / size, truth / size, atol=1e-6, err_msg=name)


@every_implementation("gated_linear_unit")
@every_activation
@every_dtype
def test_gated_linear_unit_of_nearly_closed_gates_keeps_digits(implementation, activation, dtype):
    """A product with a gate near 0 has an error relative to 1, not relative to itself."""
    case = Case((4, 40), dtype, activation=activation)
    gate = spread(-36 if activation == "silu" else -6, -1)
    drawn = draw_values("gated_linear_unit", case, gate=gate)
    results = run("gated_linear_unit", implementation, drawn)
    tolerance = 100 * np.finfo(dtype).eps  # u is up to 36 and σ(u) nearly its exponential
    for name in ("output", "gradient of x"):
        truth = reference("gated_linear_unit", drawn, "float64")[name]
        np.testing.assert_allclose(results[name], truth, rtol=tolerance, err_msg=name)


@every_implementation("gated_linear_unit")
@every_activation
def test_gated_linear_unit_of_huge_gates_is_finite(implementation, activation):
    """The third power of a gate, in gelu, or an exponential overflows."""
    sizes = np.array([1e2, 1e4, 1e13, 1e19, 1e26, 3e38])
    case = Case((2, 6), activation=activation)
    drawn = draw_values("gated_linear_unit", case, d_output=1, gate=[sizes, -sizes], x=np.ones(6))
    with np.errstate(all="ignore"):  # of the interpreter
        results = run("gated_linear_unit", implementation, drawn)
    opened, closed = drawn.tensors["gate"][0], np.zeros(6)
    np.testing.assert_allclose(results["output"], [opened, closed], rtol=1e-6)
    np.testing.assert_allclose(results["gradient of x"], [opened, closed], rtol=1e-6)
    d_gate = results["gradient of gate"]
    np.testing.assert_allclose(d_gate, [closed + 1, closed], rtol=1e-6, atol=1e-30)


@every_implementation("log_forget_gate")
@pytest.mark.parametrize("bounded", [True, False])
def test_forget_gate_of_extreme_logits_and_bounds_is_finite(implementation, bounded):
    """A gate at 0 or 1, or a bound at 0 or 1, gives NaN, or an output above 0."""
    half = np.log(0.5)
    bound = {"lower_bound": [[-np.inf, -90, half, 0], [0, 0, half, -90]]} if bounded else {}
    logits = np.array([-1e30, -100, 0, 15, 100, 1e30])[:, None]
    case = Case((6, 4), parameter=bounded)
    drawn = draw_values("log_forget_gate", case, logits=logits, **bound)
    results = run("log_forget_gate", implementation, drawn)
    for name, truth in reference("log_forget_gate", drawn, "float64").items():
        np.testing.assert_allclose(results[name], truth, rtol=1e-6, atol=1e-6, err_msg=name)
    assert (results["output"] <= 0).all()
    # Where β is 0, a gate near 1 keeps its digits.
    np.testing.assert_allclose(results["output"][3, 0], -np.log1p(np.exp(-15)), rtol=1e-6)


@every_implementation("log_forget_gate")
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_forget_gate_of_logit_minus_infinity_equals_its_bound(implementation):
    """A gate of 0 with the bound 0 gives NaN instead of log 0."""
    bound = np.array([[-np.inf, -1], [0, np.log1p(-np.exp(-1))]], "float32")
    logits = np.full((1, 2), -np.inf, "float32")
    output = ops.log_forget_gate(logits, bound, implementation=implementation)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(output), [[-np.inf, -1]])


@every_implementation("log_forget_gate")
def test_forget_gate_with_a_bound_keeps_digits(implementation):
    """A result near 0 has an error relative to 1, for some gate and some bound."""
    beta, z = np.array([0, 1e-6, 0.5, 0.999])[:, None], np.linspace(-30, 30, 241)
    with np.errstate(divide="ignore"):
        bound = np.log([beta + 0 * z, 1 - beta + 0 * z]).reshape(2, -1)
    # With one token, the gradient of the bound is no sum.
    case = Case((1, bound.shape[1]))
    values = {"logits": np.tile(z, 4), "lower_bound": bound}
    drawn = draw_values("log_forget_gate", case, d_output=1, **values)
    results = run("log_forget_gate", implementation, drawn)
    forgotten = np.exp(drawn.tensors["lower_bound"][1]) / (1 + np.exp(drawn.tensors["logits"]))
    half_open = forgotten <= 0.5
    expected = np.log1p(-forgotten[half_open])
    np.testing.assert_allclose(results["output"][half_open], expected, rtol=1e-6)
    loop = reference("log_forget_gate", drawn, "float32")
    for name, truth in reference("log_forget_gate", drawn, "float64").items():
        size = np.where(truth == 0, 1, np.abs(truth))
        wrong, allowed = (
            (np.abs(result[name] - truth) / size).reshape(-1, 4, z.size).max((0, 2))
            for result in (results, loop)
        )
        assert (wrong <= 2 * allowed + 2 * np.finfo("float32").eps).all(), (name, wrong, allowed)


@every_implementation("log_forget_gate")
@pytest.mark.parametrize("row", [0, 1])
def test_forget_gate_with_nan_in_either_row_of_its_bound_is_nan(implementation, row):
    """NaN in log β or in log(1 - β) is replaced by a number, or reaches another channel."""
    logits = np.array([-1e30, -10, 0, 5, 15, 1e30])[:, None]
    drawn = draw_values("log_forget_gate", Case((6, 4)), logits=logits)
    drawn.tensors["lower_bound"][row, 1] = np.nan
    results = run("log_forget_gate", implementation, drawn)
    for name in ("output", "gradient of logits"):
        assert (np.isnan(results[name]) == (np.arange(4) == 1)).all(), name


def draw_crossentropy(logits, tokens, dtype="float32"):
    case = Case(logits.shape, dtype)
    return draw_values("token_crossentropy", case, logits=logits, tokens=tokens)


@every_implementation("token_crossentropy")
def test_crossentropy_of_token_outside_the_vocabulary_is_nan(implementation):
    """An invalid label reads other memory, or changes the loss or gradient of other tokens."""
    logits = np.random.default_rng(0).normal(size=(8, 5))
    drawn = draw_crossentropy(logits, [0, -1, 4, 5, 6, -5, 2**31 - 1, -(2**31)])
    is_invalid = ~np.isin(np.arange(8), [0, 2])
    truth = reference("token_crossentropy", drawn, "float64")
    for name, result in run("token_crossentropy", implementation, drawn).items():
        for found in (result, truth[name]):
            assert np.isnan(found[is_invalid]).all(), name
        expected = truth[name][~is_invalid]
        np.testing.assert_allclose(
            result[~is_invalid], expected, rtol=1e-6, atol=1e-7, err_msg=name
        )


@every_implementation("token_crossentropy")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_crossentropy_with_impossible_tokens_matches_definition(implementation, dtype):
    """Whole tiles of logits of -inf, or a label with such a logit, give a wrong loss or NaN."""
    logits = np.random.default_rng(0).normal(size=(4, 9000))
    logits[0, :8200] = logits[1, 30:] = logits[2, ::2] = logits[3, 1:] = -np.inf
    drawn = draw_crossentropy(logits, [8500, 20, 7, 0], dtype)
    results = run("token_crossentropy", implementation, drawn)
    compare("token_crossentropy", implementation, drawn, results)
    assert (results["gradient of logits"][np.isinf(logits)] == 0).all()
    drawn.tensors["tokens"][2] = 8
    results = run("token_crossentropy", implementation, drawn)
    truth = reference("token_crossentropy", drawn, "float64")["gradient of logits"]
    assert results["output"][2] == np.inf
    tolerance = 2 * unit(dtype, np.abs(truth).max())
    np.testing.assert_allclose(results["gradient of logits"], truth, rtol=0, atol=tolerance)


@every_implementation("token_crossentropy")
@pytest.mark.parametrize("size", [-1e30, -1e4, 1e4, 1e30])
def test_crossentropy_of_logits_far_from_zero_matches_definition(implementation, size):
    """Exponentials of large logits overflow, or differences smaller than their unit count."""
    logits = np.full((3, 7), size)
    logits[1, 2], logits[2, 2] = size * 2, -size
    drawn = draw_crossentropy(logits, [2, 2, 2])
    check("token_crossentropy", implementation, drawn)
    losses = run("token_crossentropy", implementation, drawn)["output"]
    np.testing.assert_allclose(losses[0], np.log(7), rtol=1e-6)


@every_implementation("token_crossentropy")
@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(257, "bfloat16"), (50257, "float32"), (50304, "bfloat16")]
)
def test_crossentropy_of_large_vocabulary_matches_definition(implementation, vocabulary, dtype):
    """The tiles of a vocabulary are combined wrongly, or the last, incomplete one is."""
    drawn = draw("token_crossentropy", Case((3, vocabulary), dtype, scale="extreme"))
    check("token_crossentropy", implementation, drawn)


@every_implementation("token_crossentropy")
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64"])
def test_crossentropy_of_labels_of_any_integer_dtype_is_exact(implementation, dtype):
    """Labels of a dtype that cannot hold the size of the vocabulary overflow."""
    tensors = native.tensor(np.eye(3, 300), "float32"), np.array([0, 1, 5], dtype)
    choice = ops.which_implementation("token_crossentropy", *tensors, implementation=implementation)
    if choice.implementation is None:
        pytest.skip(str(choice))
    losses = ops.token_crossentropy(*tensors, implementation=implementation)
    expected = np.log(299 + np.e) - [1, 1, 0]
    np.testing.assert_allclose(native.to_numpy(losses), expected, rtol=1e-6)


@pytest.mark.skipif(PLAIN != "torch", reason="only torch loops over tokens in Python")
def test_torch_crossentropy_in_several_launches_matches_definition(monkeypatch):
    """Tokens that plain torch computes in a second or later launch are wrong."""
    module = module_of("token_crossentropy", PLAIN)
    monkeypatch.setattr(module, "elements_per_launch", lambda tensor: 100)
    for shape in ((3, 11, 33), (5, 101)):
        check("token_crossentropy", PLAIN, draw("token_crossentropy", Case(shape, "bfloat16")))


@pytest.mark.parametrize("operation", DRAW)
def test_operation_on_no_sequences_returns_no_elements(operation):
    """A batch of size 0 fails."""
    drawn = draw(operation, Case((0, 3, 8)))
    output = getattr(ops, operation)(**native.tensors(drawn), **drawn.options)
    assert output.shape == drawn.d_output.shape


@on_jax
def test_jax_forget_gate_saves_no_more_than_its_arguments():
    """XLA keeps intermediate results for the backward pass, which cost memory in training."""
    import jax

    gate = function_of("log_forget_gate", "jax")
    logits, bound = jax.numpy.ones((40, 64), "bfloat16"), jax.numpy.zeros((2, 64))
    _, backward = jax.vjp(lambda x, b: gate(logits=x, lower_bound=b), logits, bound)
    saved = sum(x.nbytes for x in jax.tree.leaves(backward))
    assert saved <= logits.nbytes + bound.nbytes


@on_jax
def test_jax_forget_gate_has_a_hessian():
    """Forward mode over reverse mode, of which `jax.hessian` consists, fails or is wrong."""
    import jax

    z = jax.numpy.array([0.0, 1.0])
    curvature = jax.numpy.diagonal(jax.hessian(lambda z: ops.log_forget_gate(z).sum())(z))
    expected = -jax.nn.sigmoid(z) * jax.nn.sigmoid(-z)
    np.testing.assert_allclose(curvature, expected, rtol=1e-6)
