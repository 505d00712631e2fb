"""Operations without a state, in every implementation, against their definitions.

How wrong they may be is said and decided in `judge`.
"""

import sys

import keras
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent import dispatch, ops
from tests.ops import native
from tests.ops.cases import round_to, unit
from tests.ops.judge import INTERPRETED, PLAIN, check, compare, kernels, reference, run
from tests.ops.token_wise import CASES, DRAW, Case, draw

KERNELS = kernels(DRAW)
every_operation = pytest.mark.parametrize("operation", DRAW)
every_kernel = pytest.mark.parametrize(("operation", "implementation"), KERNELS)


@every_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forward_and_gradients(operation, implementation, case):
    if operation == "token_crossentropy" and implementation in INTERPRETED:
        # A program has one row, and NumPy goes through the programs one by one.
        case = case._replace(shape=(min(case.shape[0], 61), *case.shape[1:]))
    with native.precision("float64" if "float64" in case else case.dtype):
        check(operation, implementation, draw(operation, case))


@pytest.mark.parametrize(
    ("operation", "implementation"),
    [
        pytest.param(*kernel, marks=() if kernel == ("rms_norm", PLAIN) else pytest.mark.nightly)
        for kernel in KERNELS
    ],
)
def test_the_check_sees_a_wrong_result(operation, implementation):
    drawn = draw(operation, Case((4, 50)))
    results = run(operation, implementation, drawn)
    for name in results:
        broken = {**results, name: results[name] * (1 + 1e-5)}
        with pytest.raises(AssertionError, match=name):
            compare(operation, implementation, drawn, broken)


# {operation: {where one number is not finite: {result: how far that reaches}}}, for NaN and, where
# it differs, for inf; of gradients, as the docstrings have it, those of weights sum over tokens.
REACH = {
    "rms_norm": {
        "x": {"output": "token", "gradient of x": "token", "gradient of scale": "all"},
        "x, inf": {"output": "place", "gradient of x": "token", "gradient of scale": "channel"},
        "scale": {"output": "channel", "gradient of x": "all"},
        "d_output": {"gradient of x": "token", "gradient of scale": "channel"},
    },
    "gated_linear_unit": {
        "gate": {"output": "place", "gradient of gate": "place", "gradient of x": "place"},
        "x": {"output": "place", "gradient of gate": "place"},
        "d_output": {"gradient of gate": "place", "gradient of x": "place"},
    },
    "log_forget_gate": {
        "logits": {
            "output": "place",
            "gradient of logits": "place",
            "gradient of lower_bound": "channel",
        },
        "logits, inf": {},
        "lower_bound": {
            "output": "channel",
            "gradient of logits": "channel",
            "gradient of lower_bound": "channel",
        },
        "d_output": {"gradient of logits": "place", "gradient of lower_bound": "channel"},
    },
    "token_crossentropy": {
        "logits": {"output": "token", "gradient of logits": "token"},
        "d_output": {"gradient of logits": "token"},
    },
}
TOKEN, CHANNEL = 1, 7


def reached(shape, reach):
    """Where a result of this shape may not be finite."""
    found = np.zeros(shape, "bool")
    by_channel, by_token = shape[-1] == 50, shape[0] == 4
    token = TOKEN if by_token and reach in ("place", "token") else slice(None)
    channel = CHANNEL if by_channel and reach in ("place", "channel") else slice(None)
    found[(token, channel) if len(shape) == 2 else token if by_token else channel] = (
        reach is not None
    )
    return found


@every_kernel
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_how_far_what_is_not_finite_reaches(operation, implementation, number):
    """Exactly so far where it is NaN, and no farther where it is infinite."""
    reaches = REACH[operation]
    for where in [name for name in reaches if "inf" not in name]:
        if np.isinf(number) and where == "lower_bound":
            continue  # log β is at most 0, and may be -inf
        reach = reaches[where]
        if np.isinf(number):
            reach = reaches.get(f"{where}, inf", reach)
        drawn = draw(operation, Case((4, 50)))
        array = drawn.d_output if where == "d_output" else drawn.tensors[where]
        if array.shape[0] == 4:
            array[(TOKEN, CHANNEL)[: array.ndim]] = number
        else:
            array[..., CHANNEL] = number
        with np.errstate(all="ignore"):  # where NumPy stands in for a GPU
            results = run(operation, implementation, drawn)
        for name, result in results.items():
            lost, may = ~np.isfinite(result), reached(result.shape, reach.get(name))
            message = f"{name}, {number} in {where}"
            assert not (lost & ~may).any(), message
            if np.isnan(number):
                assert (lost == may).all(), message


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "rms_norm"])
def test_rows_of_any_size(implementation):
    """With ε = 0: right where the sum of squares is a number of float32, and finite elsewhere."""
    drawn = draw("rms_norm", Case((8, 12)))
    sizes = np.array([1e-17, 1e-13, 1, 1e13, 1e18, 0, 1e-30, 1e30])
    drawn = drawn._replace(options={"epsilon": 0.0})
    drawn.tensors["x"][:] = round_to("float32", drawn.tensors["x"] * sizes[:, None])
    drawn.d_output[5:] = 0  # of the gradient of the scale, too, only rows that are right
    with np.errstate(all="ignore"):  # where NumPy stands in for a GPU
        results = run("rms_norm", implementation, drawn)
    right = {n: t[:5] if n != "scale" else t for n, t in drawn.tensors.items()}
    right = drawn._replace(tensors=right, d_output=drawn.d_output[:5])
    for name, truth in reference("rms_norm", right, "float64").items():
        assert np.isfinite(results[name]).all(), name
        found, largest = results[name][:5], np.abs(truth).max(-1, keepdims=True)
        if name == "gradient of scale":
            found = results[name]
        np.testing.assert_allclose(found / largest, truth / largest, atol=1e-6, err_msg=name)
    drawn.d_output[5:] = 1
    with np.errstate(all="ignore"):
        results = run("rms_norm", implementation, drawn)
    for name, result in results.items():
        assert np.isfinite(result).all(), name


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "rms_norm"])
@pytest.mark.parametrize("width", [12, 3000])
@pytest.mark.parametrize("epsilon", [0.0, 1e-35, 1e-6])
def test_rows_of_any_mean_square(implementation, width, epsilon):
    """Right from the smallest mean square of float32 to the largest, whatever squares may be."""
    drawn = draw("rms_norm", Case((6, width), parameter=False))
    x = drawn.tensors["x"]
    x[:3] /= np.sqrt(np.mean(x[:3] ** 2, axis=-1, keepdims=True))
    x[3:] = np.where(np.arange(width) == 1, np.sqrt(width), 0)  # one number makes the mean
    x[:] = round_to("float32", x * np.array([1.1 * 2.0**-63, 1, 1.8e19] * 2)[:, None])
    drawn = drawn._replace(options={"epsilon": epsilon})
    results = run("rms_norm", implementation, drawn)
    for name, truth in reference("rms_norm", drawn, "float64").items():
        largest = np.abs(truth).max(-1, keepdims=True)
        np.testing.assert_allclose(
            results[name] / largest, truth / largest, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "log_forget_gate"])
@pytest.mark.parametrize("bounded", [True, False])
def test_gates_that_are_shut_or_open(implementation, bounded):
    """What ends at float32's smallest and largest numbers is finite, and so is its gradient."""
    drawn = draw("log_forget_gate", Case((6, 4), parameter=bounded))
    drawn.tensors["logits"][:] = np.array([-1e30, -100, 0, 15, 100, 1e30])[:, None]
    if bounded:
        half = round_to("float32", np.log(0.5))
        drawn.tensors["lower_bound"][:] = [[-np.inf, -90, half, 0], [0, 0, half, -90]]
    results = run("log_forget_gate", implementation, drawn)
    truth = reference("log_forget_gate", drawn, "float64")
    for name in results:
        np.testing.assert_allclose(results[name], truth[name], rtol=1e-6, atol=1e-6, err_msg=name)
    assert (results["output"] <= 0).all()
    # Where β is 0, a gate near 1 keeps its digits.
    np.testing.assert_allclose(results["output"][3, 0], -np.log1p(np.exp(-15)), rtol=1e-6)


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "log_forget_gate"])
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_a_bound_of_zero_leaves_a_gate_shut(implementation):
    bound = np.array([[-np.inf, -1], [0, np.log1p(-np.exp(-1))]], "float32")
    found = ops.log_forget_gate(
        np.full((1, 2), -np.inf, "float32"), bound, implementation=implementation
    )
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(found), [[-np.inf, -1]])


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "gated_linear_unit"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gates_that_are_nearly_open(implementation, activation, dtype):
    """There the derivative of the gate depends on the little by which it is not open."""
    drawn = draw("gated_linear_unit", Case((4, 40), dtype, activation=activation))
    far = 36 if activation == "silu" else 6
    drawn.tensors["gate"][:] = round_to(dtype, np.linspace(1, far, 160).reshape(4, 40))
    drawn.tensors["x"][:] = drawn.d_output[:] = 1
    with native.precision(dtype):
        check("gated_linear_unit", implementation, drawn)


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "gated_linear_unit"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gates_that_are_nearly_shut(implementation, activation, dtype):
    """What little passes keeps its digits, relative to itself."""
    drawn = draw("gated_linear_unit", Case((4, 40), dtype, activation=activation))
    shut = -36 if activation == "silu" else -6
    drawn.tensors["gate"][:] = round_to(dtype, np.linspace(shut, -1, 160).reshape(4, 40))
    with native.precision(dtype):
        results = run("gated_linear_unit", implementation, drawn)
    tolerance = 100 * np.finfo(dtype).eps  # u is up to 36 and σ(u) nearly its exponential
    for name in ("output", "gradient of x"):
        truth = reference("gated_linear_unit", drawn, "float64")[name]
        np.testing.assert_allclose(results[name], truth, rtol=tolerance, err_msg=name)


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "gated_linear_unit"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gates_of_any_size(implementation, activation):
    """gelu takes the third power of the gate."""
    drawn = draw("gated_linear_unit", Case((2, 6), activation=activation))
    sizes = np.array([1e2, 1e4, 1e13, 1e19, 1e26, 3e38])
    drawn.tensors["gate"][:] = round_to("float32", np.stack([sizes, -sizes]))
    drawn.tensors["x"][:] = drawn.d_output[:] = 1
    with np.errstate(all="ignore"):  # where NumPy stands in for a GPU
        results = run("gated_linear_unit", implementation, drawn)
    open_gate, shut = drawn.tensors["gate"][0], np.zeros(6)
    np.testing.assert_allclose(results["output"], [open_gate, shut], rtol=1e-6)
    np.testing.assert_allclose(results["gradient of x"], [open_gate, shut], rtol=1e-6)
    np.testing.assert_allclose(results["gradient of gate"], [shut + 1, shut], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "log_forget_gate"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("logits", [(-30, -1), (14.56, 14.86)])
def test_slopes_of_gates(implementation, dtype, logits):
    drawn = draw("log_forget_gate", Case((4, 40), dtype, parameter=False))
    drawn.tensors["logits"][:] = round_to(dtype, np.linspace(*logits, 160).reshape(4, 40))
    drawn.d_output[:] = 1
    with native.precision(dtype):
        check("log_forget_gate", implementation, drawn)


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "log_forget_gate"])
def test_gates_with_a_bound_keep_their_digits(implementation):
    """Each result relative to itself, for gates that are shut, open and between, and any bound."""
    beta, z = np.array([0, 1e-6, 0.5, 0.999])[:, None], np.linspace(-30, 30, 241)
    with np.errstate(divide="ignore"):
        bound = np.log([beta + 0 * z, 1 - beta + 0 * z]).reshape(2, -1)
    # One row: its channels do not add up in the gradient of the bound.
    drawn = draw("log_forget_gate", Case((1, bound.shape[1])))
    drawn.tensors["logits"][:] = round_to("float32", np.tile(z, 4))
    drawn.tensors["lower_bound"][:] = round_to("float32", bound)
    drawn.d_output[:] = 1
    results = run("log_forget_gate", implementation, drawn)
    forgotten = np.exp(drawn.tensors["lower_bound"][1]) / (1 + np.exp(drawn.tensors["logits"]))
    half_open = forgotten <= 0.5
    found, wanted = results["output"][half_open], np.log1p(-forgotten[half_open])
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    loop = reference("log_forget_gate", drawn, "float32")
    for name, truth in reference("log_forget_gate", drawn, "float64").items():
        size = np.where(truth == 0, 1, np.abs(truth))
        wrong, allowed = (
            (np.abs(found[name] - truth) / size).reshape(-1, 4, z.size).max((0, 2))
            for found in (results, loop)
        )
        assert (wrong <= 2 * allowed + 2 * np.finfo("float32").eps).all(), (name, wrong, allowed)


@pytest.mark.parametrize("implementation", [i for o, i in KERNELS if o == "log_forget_gate"])
@pytest.mark.parametrize("row", [0, 1])
def test_either_half_of_a_bound_may_be_nan(implementation, row):
    drawn = draw("log_forget_gate", Case((6, 4)))
    drawn.tensors["logits"][:] = np.array([-1e30, -10, 0, 5, 15, 1e30])[:, None]
    drawn.tensors["lower_bound"][row, 1] = np.nan
    results = run("log_forget_gate", implementation, drawn)
    for name in ("output", "gradient of logits"):
        assert (np.isnan(results[name]) == (np.arange(4) == 1)).all(), name


every_crossentropy = pytest.mark.parametrize(
    "implementation", [i for o, i in KERNELS if o == "token_crossentropy"]
)


def crossentropy(logits, tokens, dtype="float32"):
    """As `draw` makes it of what is given."""
    drawn = draw("token_crossentropy", Case(logits.shape, dtype))
    drawn.tensors.update(logits=round_to(dtype, logits), tokens=np.asarray(tokens))
    return drawn


@every_crossentropy
def test_tokens_that_are_none(implementation):
    """Neither read from elsewhere nor looked for before; the rows beside them do not feel it."""
    logits = np.random.default_rng(0).normal(size=(8, 5))
    drawn = crossentropy(logits, [0, -1, 4, 5, 6, -5, 2**31 - 1, -(2**31)])
    none = [1, 3, 4, 5, 6, 7]
    truth = reference("token_crossentropy", drawn, "float64")
    for name, result in run("token_crossentropy", implementation, drawn).items():
        assert np.isnan(result[none]).all(), name
        assert np.isnan(truth[name][none]).all(), name
        found, wanted = (np.delete(r, none, axis=0) for r in (result, truth[name]))
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7, err_msg=name)


@every_crossentropy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_that_cannot_come(implementation, dtype):
    """Whole tiles of them, before or behind the others; one that came all the same."""
    logits = np.random.default_rng(0).normal(size=(4, 9000))
    logits[0, :8200] = logits[1, 30:] = logits[2, ::2] = logits[3, 1:] = -np.inf
    drawn = crossentropy(logits, [8500, 20, 7, 0], dtype)
    results = run("token_crossentropy", implementation, drawn)
    compare("token_crossentropy", implementation, drawn, results)
    assert (results["gradient of logits"][np.isinf(logits)] == 0).all()
    drawn.tensors["tokens"][2] = 8
    results = run("token_crossentropy", implementation, drawn)
    truth = reference("token_crossentropy", drawn, "float64")["gradient of logits"]
    assert results["output"][2] == np.inf
    tolerance = 2 * unit(dtype, np.abs(truth).max())
    np.testing.assert_allclose(results["gradient of logits"], truth, rtol=0, atol=tolerance)


@every_crossentropy
@pytest.mark.parametrize("size", [-1e30, -1e4, 1e4, 1e30])
def test_logits_far_from_zero(implementation, size):
    """Where logits differ by less than their last place, they are the same."""
    logits = np.full((3, 7), size)
    logits[1, 2], logits[2, 2] = size * 2, -size
    drawn = crossentropy(logits, [2, 2, 2])
    check("token_crossentropy", implementation, drawn)
    losses = run("token_crossentropy", implementation, drawn)["output"]
    np.testing.assert_allclose(losses[0], np.log(7), rtol=1e-6)


@every_crossentropy
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("vocabulary", [257, 50257, 50304])
def test_vocabularies(implementation, vocabulary, dtype):
    drawn = draw("token_crossentropy", Case((3, vocabulary), dtype, scale="extreme"))
    check("token_crossentropy", implementation, drawn)


@every_crossentropy
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64"])
def test_tokens_of_any_integers(implementation, dtype):
    """Also where the vocabulary's size is no such number."""
    tensors = native.tensor(np.eye(3, 300), "float32"), np.array([0, 1, 5], dtype)
    choice = ops.which_implementation("token_crossentropy", *tensors, implementation=implementation)
    if choice.implementation is None:
        pytest.skip(str(choice))
    losses = ops.token_crossentropy(*tensors, implementation=implementation)
    expected = np.log(299 + np.e) - [1, 1, 0]
    np.testing.assert_allclose(numpy(losses), expected, rtol=1e-6)


@pytest.mark.skipif(PLAIN != "torch", reason="only torch walks through rows in Python")
def test_a_few_rows_at_a_time(monkeypatch):
    module = sys.modules[f"keras_recurrent.backends.{PLAIN}.token_crossentropy"]
    monkeypatch.setattr(module, "elements_per_launch", lambda tensor: 100)
    for shape in ((3, 11, 33), (5, 101)):
        check("token_crossentropy", PLAIN, draw("token_crossentropy", Case(shape, "bfloat16")))


@every_operation
def test_agrees_with_the_definition(operation):
    drawn = draw(operation, Case((2, 3, 8)))
    output = call(operation, drawn)
    truth = reference(operation, drawn, "float64")["output"]
    np.testing.assert_allclose(numpy(output), truth, rtol=1e-5, atol=1e-6)


@every_operation
@pytest.mark.parametrize("parameter", [True, False])
def test_in_a_symbolic_graph(operation, parameter, tmp_path):
    drawn = draw(operation, Case((2, 3, 8), "bfloat16", "float32", parameter=parameter))
    inputs = {
        name: keras.Input(
            batch_shape=(None, None, 8) if t.ndim == 3 else t.shape,
            dtype=drawn.dtypes[name],
            name=name,
        )
        for name, t in drawn.tensors.items()
        if t is not None
    }
    output = getattr(ops, operation)(**inputs, **drawn.options)
    assert output.shape == (None, None, 8)[: drawn.d_output.ndim]
    assert output.dtype == drawn.output_dtype
    model = keras.Model(inputs, output)
    model.save(tmp_path / "model.keras")
    expected = numpy(call(operation, drawn))
    feed = {n: given(drawn, n) for n in inputs}
    for m in (model, keras.models.load_model(tmp_path / "model.keras")):
        np.testing.assert_array_equal(numpy(m(feed)), expected)


@every_operation
def test_nothing_comes_of_nothing(operation):
    drawn = draw(operation, Case((0, 3, 8)))
    assert call(operation, drawn).shape == drawn.d_output.shape


@every_operation
def test_which_implementation_tells(operation):
    drawn = draw(operation, Case((2, 8)))
    tensors = [given(drawn, n) for n in drawn.tensors]
    for name in (operation, getattr(ops, operation)):
        choice = keras_recurrent.which_implementation(name, *tensors, **drawn.options)
        assert choice.implementation in dispatch.PREFERENCE[dispatch.BACKEND]
    with pytest.raises(ValueError, match=f"`{operation}` takes no argument 'mask'"):
        keras_recurrent.which_implementation(operation, *tensors, **drawn.options, mask=None)
    with keras_recurrent.implementation(PLAIN):
        choice = keras_recurrent.which_implementation(operation, *tensors, **drawn.options)
    assert choice.implementation == PLAIN


X = np.ones((2, 3, 8), "float32")
BAD = {
    "scale": (lambda: ops.rms_norm(X, X[0], epsilon=0), r"`scale` must have 1 dimension, \[D\]"),
    "width": (lambda: ops.rms_norm(X, X[0, 0, :4], epsilon=0), "`scale` .* D should be 8, not 4"),
    "rank": (lambda: ops.rms_norm(X[0, 0, 0], epsilon=0), r"at least 1 dimension, \[..., D\]"),
    "dtype": (lambda: ops.rms_norm(X.astype("int32"), epsilon=0), "`x` must be one of float16"),
    "none": (lambda: ops.rms_norm(None, epsilon=0), "needs the argument `x`"),
    "epsilon": (lambda: ops.rms_norm(X, epsilon=-1.0), "`epsilon` must be .* at least 0; got -1.0"),
    "nan": (lambda: ops.rms_norm(X, epsilon=np.nan), "`epsilon` must be a finite .*; got nan"),
    "inf": (lambda: ops.rms_norm(X, epsilon=np.inf), "`epsilon` must be a finite .*; got inf"),
    "truth": (lambda: ops.rms_norm(X, epsilon=True), "`epsilon` must be a finite .*; got True"),
    "epsilon kind": (lambda: ops.rms_norm(X, epsilon="0"), "`epsilon` must be a finite number"),
    "activation": (
        lambda: ops.gated_linear_unit(X, X, activation="relu"),
        "`activation` must be 'silu' or 'gelu'; got 'relu'",
    ),
    "shapes": (
        lambda: ops.gated_linear_unit(X, X[:1], activation="silu"),
        r"`x` must have the shape \[...\], with ... = \(2, 3, 8\); got the shape \(1, 3, 8\)",
    ),
    "bound": (
        lambda: ops.log_forget_gate(X, X[0]),
        r"`lower_bound` must have the shape \[2, D\], .*D = 8; got the shape \(3, 8\)",
    ),
    "tokens": (
        lambda: ops.token_crossentropy(X, X[..., 0]),
        "`tokens` must be integers; got float32",
    ),
    "token shapes": (
        lambda: ops.token_crossentropy(X, np.zeros((2, 3, 1), "int32")),
        r"`tokens` must have the shape \[...\], with ... = \(2, 3\).* got the shape \(2, 3, 1\)",
    ),
    "vocabulary": (
        lambda: ops.token_crossentropy(X[..., :0], np.zeros((2, 3), "int32")),
        r"a vocabulary of at least one token; got the shape \(2, 3, 0\)",
    ),
    "graph": (
        lambda: ops.gated_linear_unit(
            keras.Input((None, 4)), keras.Input((None, 5)), activation="silu"
        ),
        r"got the shape \(None, None, 5\)",
    ),
    "name": (
        lambda: ops.log_forget_gate(X, implementation="cuda"),
        "`implementation` must be one of",
    ),
}


@pytest.mark.once
@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_name_themselves(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def numpy(tensor):
    return keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32"))


def given(drawn, name):
    """A tensor of those drawn, None where there is none."""
    t = drawn.tensors[name]
    return None if t is None else native.tensor(t, drawn.dtypes[name])


def call(operation, drawn):
    tensors = {name: given(drawn, name) for name in drawn.tensors}
    return getattr(ops, operation)(**tensors, **drawn.options)


@pytest.mark.skipif(PLAIN != "jax", reason="XLA decides there what is kept")
def test_the_backward_of_gates_keeps_no_more_than_the_logits():
    import jax

    kernel = dispatch.IMPLEMENTATIONS["log_forget_gate"]["jax"]
    logits, bound = jax.numpy.ones((40, 64), "bfloat16"), jax.numpy.zeros((2, 64))
    _, backward = jax.vjp(
        lambda logits, bound: kernel.function(logits=logits, lower_bound=bound), logits, bound
    )
    kept = sum(x.nbytes for x in jax.tree.leaves(backward))
    assert kept <= logits.nbytes + bound.nbytes


@pytest.mark.skipif(PLAIN != "jax", reason="of JAX's transforms")
def test_a_hessian_of_gates():
    """Forward mode over reverse mode, which `jax.hessian` takes."""
    import jax

    z = jax.numpy.array([0.0, 1.0])
    curvature = jax.numpy.diagonal(jax.hessian(lambda z: ops.log_forget_gate(z).sum())(z))
    expected = -jax.nn.sigmoid(z) * jax.nn.sigmoid(-z)
    np.testing.assert_allclose(curvature, expected, rtol=1e-6)
