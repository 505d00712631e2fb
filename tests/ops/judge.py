"""How wrong an implementation of an operation may be, and how wrong it is.

The definition is computed in float64, or in NumPy's longest floats where an input is of float64.
The plain implementation of a backend may be at most twice as wrong as the definition in float32 (a
loop over the tokens; in float64 where an input is), plus two units in the last place; any other at
most twice as wrong as the plain one.

Inputs are those of `cases.draw` for operations over time, and of `token_wise.draw` for the others.
"""

import contextlib
import functools
import importlib
import os
from unittest import mock

import keras
import numpy as np
import pytest

from keras_recurrent import dispatch
from tests.gpu import has_gpu
from tests.ops import cases, native
from tests.ops.cases import PARTS, beside, named, round_to, unit
from tests.ops.token_wise import INTEGERS

PLAIN = dispatch.BACKEND  # the folder of the plain implementation is named after the backend
# Where NumPy stands in for a GPU, it rounds a product before adding to it: as the loop does, not as
# the plain kernels, which like a GPU round once.
INTERPRETED = ("triton",) if os.environ.get("TRITON_INTERPRET") == "1" else ()

# How exactly an exponential or a sum is rounded depends on the GPU and on the CPU, and so does how
# lucky the loop was.
NEIGHBORS = 4
# CUDA's are off by up to 2 units in the last place, NumPy's by less than 1.
ELEMENTARY = ("exp", "expm1", "log1p", "logaddexp", "tanh")


def kernels(operations):
    """The pairs of an operation and an implementation that run here, if only interpreted."""
    return [
        (operation, implementation)
        for operation in operations
        for implementation, module in dispatch.IMPLEMENTATIONS[operation].items()
        if not isinstance(module, str) and native.runs(implementation)
    ]


def check(operation, implementation, drawn):
    results = run(operation, implementation, drawn)
    compare(operation, implementation, drawn, results, neighbors=NEIGHBORS)


def run(operation, implementation, drawn, compiled=False):
    """{name: float64 array}: the output, the final state and the gradient of every argument."""
    kernel = kernel_of(operation, implementation)
    with native.interpreted(implementation):
        if isinstance(drawn, cases.Drawn):
            return native.run(kernel, drawn, compiled)
        return native.run_token_wise(kernel, drawn, compiled)


@functools.cache
def kernel_of(operation, implementation):
    """A function that computes an operation, or skips the test with the reason that it refuses."""
    row = dispatch.IMPLEMENTATIONS[operation]

    def kernel(**arguments):
        reason = native.refusal(row[implementation], arguments)
        if reason is not None:
            pytest.skip(f"{implementation} refuses: {reason}")
        return row[implementation].function(**arguments)

    return kernel


def compare(
    operation, implementation, drawn, results, neighbors=0, floor=0.0, extra=None, defined=None
):
    """Raises an AssertionError that names the first result that is too wrong.

    neighbors: how many inputs beside the given ones, each number of them at most one unit in the
        last place away, are computed in the plain way, too, where the given ones alone show a
        result to be too wrong; and, where these do not help, as many whose gradients of the
        results are moved as well. The most wrong of them counts: that a sum happened to come out
        exactly is luck which the rule does not ask for twice.
    floor: an error below it is none.
    extra: {name of a result: what is allowed beside the rule}.
    defined: `definition(operation, drawn)`, where the caller has used it already.
    """
    defined = defined or definition(operation, drawn)
    truth = defined(exact(drawn))
    for name, expected in truth.items():
        if name == "final_state position":
            np.testing.assert_array_equal(results[name], expected, err_msg=name)
        else:
            assert np.isfinite(results[name]).all(), f"{name}: not finite"
    wrong = errors(drawn, truth, results)
    allowed = tolerances(operation, implementation, drawn, defined)
    for seed in range(2 * neighbors):
        if all(wrong[name] <= allowed[name] + floor for name in wrong):
            break
        near = neighbor(drawn, seed, d_results=seed >= neighbors)
        more = tolerances(operation, implementation, near, definition(operation, near))
        allowed = {name: max(allowed[name], more[name]) for name in allowed}
    for name in wrong:
        allowed[name] += floor + (extra or {}).get(name, 0)
        message = f"{name}: error {wrong[name]:.3g}, allowed {allowed[name]:.3g}"
        assert wrong[name] <= allowed[name], message


def tolerances(operation, implementation, drawn, defined):
    """How wrong each result may be."""
    truth = defined(exact(drawn))
    if implementation == PLAIN or implementation in INTERPRETED:
        precision = "float64" if "float64" in drawn.dtypes.values() else "float32"
        yardstick = defined(precision)
    else:
        yardstick = run(operation, PLAIN, drawn)
    found = errors(drawn, truth, yardstick)
    path = {}
    if isinstance(drawn, cases.Drawn):
        # A state is one point of a path: the whole path says how wrong it may be.
        path = {"final_state": "output", "gradient of initial_state": f"gradient of {drawn.output}"}
        path |= {f"gradient of initial_state {p}": f"gradient of {t}" for p, t in PARTS.items()}
    return {
        name: 2 * max(error, found[path.get(name, name)])
        + 2 * unit(dtype_of_last_place(drawn, name), np.abs(truth[name]).max(initial=0))
        for name, error in found.items()
    }


def errors(drawn, truth, results):
    """{name: the largest difference}, but for positions and what padding gives."""
    kind = getattr(drawn, "token_kind", None)
    found = {}
    for name, expected in truth.items():
        if name == "final_state position":
            continue
        difference = np.abs(results[name] - expected)
        if name == "output" and kind is not None:
            difference = np.where(beside(difference, kind) == 2, 0, difference)
        found[name] = float(difference.max(initial=0))
    return found


def longer_than(dtype):
    """The precision of the truth about what is computed in one of 32 or of 64 bits."""
    if dtype != "float64":
        return "float64"
    if np.finfo("longdouble").nmant <= np.finfo("float64").nmant:
        pytest.skip("NumPy has no floats longer than float64 on this machine")
    return "longdouble"


def moved(rng, array, dtype):
    """Numbers moved by up to one unit in the last place; what has none as it is."""
    if array is None or dtype not in cases.EPSILON:
        return array
    units = rng.integers(-1, 2, np.shape(array))
    return round_to(dtype, array * (1 + units * cases.EPSILON[dtype]))


def neighbor(drawn, seed, d_results):
    """The same inputs, but each number moved up or down by one unit in the last place, or not.

    d_results: whether those of the gradients of the results are moved, too.
    """
    rng = np.random.default_rng(seed)

    def moved_state(state):
        parts = named("state", state).items()
        parts = {name: moved(rng, array, drawn.dtypes.get(name)) for name, array in parts}
        return cases.unnamed("state", parts) if parts else None

    over_time = isinstance(drawn, cases.Drawn)
    tensors = {n: moved(rng, t, drawn.dtypes.get(n)) for n, t in drawn.tensors.items()}
    near = drawn._replace(tensors=tensors)
    if over_time:
        near = near._replace(initial_state=moved_state(drawn.initial_state))
    if d_results:
        dtype = drawn.dtypes[drawn.output] if over_time else drawn.output_dtype
        near = near._replace(d_output=moved(rng, drawn.d_output, dtype))
        if over_time:
            near = near._replace(d_final_state=moved_state(drawn.d_final_state))
    return near


def exact(drawn):
    """The precision that tells how wrong results are."""
    return longer_than("float64" if "float64" in drawn.dtypes.values() else "float32")


def dtype_of_last_place(drawn, name):
    """Whose units a result may be off by: of operations over time, the coarsest dtype of all."""
    if isinstance(drawn, cases.Drawn):
        return min(drawn.dtypes.values(), key=list(cases.EPSILON).index)
    return dtype_of(drawn, name)


def dtype_of(drawn, name):
    """The dtype that a kernel returns a result in."""
    if not isinstance(drawn, cases.Drawn):
        return drawn.output_dtype if name == "output" else drawn.dtypes[name[len("gradient of ") :]]
    name = name.removeprefix("gradient of ").replace("final_state", "initial_state")
    name = drawn.output if name == "output" else name.replace("initial_state", "state")
    return drawn.dtypes.get(name)


def definition(operation, drawn):
    """`reference` as a function of the precision alone, which computes each only once."""
    return functools.cache(functools.partial(reference, operation, drawn))


@contextlib.contextmanager
def elementary_functions_of_the_gpu():
    """Replaces NumPy's in float32, if there is a GPU: the loop errs as a loop on the GPU would."""
    with contextlib.ExitStack() as stack:
        for name in ELEMENTARY if has_gpu() else ():
            function = functools.partial(on_gpu, name, getattr(np, name))
            stack.enter_context(mock.patch.object(np, name, function))
        yield


def on_gpu(name, numpy_function, *arrays):
    result = numpy_function(*arrays)
    if result.dtype != "float32":
        return result
    arrays = [keras.ops.convert_to_tensor(np.asarray(a, "float32")) for a in arrays]
    return keras.ops.convert_to_numpy(getattr(keras.ops, name)(*arrays))


def reference(operation, drawn, precision):
    """What the definition computes in a precision, rounded to the dtypes that a kernel returns."""
    module = importlib.import_module(f"keras_recurrent.backends.reference.{operation}")
    arguments = {**drawn.tensors, **drawn.options, "dtype": np.dtype(precision)}
    given, cotangents = drawn.tensors, [drawn.d_output]
    if isinstance(drawn, cases.Drawn):
        context = {"initial_state": drawn.initial_state, "token_kind": drawn.token_kind}
        arguments |= context
        given = given | {"initial_state": drawn.initial_state}
        cotangents.append(drawn.d_final_state)
    with np.errstate(over="ignore"), elementary_functions_of_the_gpu():
        output = getattr(module, operation)(**arguments)
        gradients = getattr(module, f"{operation}_gradient")(*cotangents, **arguments)
    results = {}
    if isinstance(drawn, cases.Drawn):
        output, final_state = output
        results = named("final_state", final_state)
    results = {"output": output} | results
    for (name, argument), gradient in zip(given.items(), gradients, strict=True):
        if argument is not None and name not in INTEGERS:
            results |= named(f"gradient of {name}", gradient)
        elif not isinstance(drawn, cases.Drawn):
            assert gradient is None
    if precision == exact(drawn):
        return results
    return {
        name: round_to(dtype_of(drawn, name) or precision, result)
        for name, result in results.items()
    }
