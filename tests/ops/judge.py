"""Judges the error of an implementation of an operation by the definition of the operation.

The truth is the definition, `keras_recurrent.backends.reference`, in float64, or in NumPy's longest
floats if an input is float64. The largest error of each result and gradient may be at most

- for the plain implementation of a backend: twice the error of the definition, a loop over the
  tokens, in float32 (in float64 if an input is float64), plus two units in the last place;
- for any other implementation: twice the error of the plain one, plus two units in the last place.

    drawn = cases.draw("linear_scan", cases.Case(batch=2, length=97, channels=5))
    check("linear_scan", "triton", drawn)

raises `AssertionError: gradient of x: error 3e-07, allowed 2e-07` if a gradient is too wrong.
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
from tests.ops.cases import FLOATS, PARTS, align, flatten, map_tensors, nest, round_to, unit

PLAIN = dispatch.BACKEND  # The plain implementation has the name of the backend.
# Triton's interpreter rounds a product before NumPy adds to it: as the definition does, unlike the
# plain implementation and GPUs, which round once. Interpreted kernels are judged as plain ones.
INTERPRETED = ("triton",) if os.environ.get("TRITON_INTERPRET") == "1" else ()
# Operations of which all implementations are judged as plain ones.
JUDGED_AS_PLAIN = ("linear_crossentropy",)
# JAX's interpreter of TPU kernels takes up to a minute for a test.
SLOW = ("pallas",)
# The definition may be exact by chance, so that the rounding of an exponential or of a sum, which
# depends on the GPU and the CPU, is an error. Neighboring inputs reveal such chances.
NEIGHBORS = 4
# Functions whose error is up to 2 units in the last place in CUDA, and less than 1 in NumPy.
ELEMENTARY = ("exp", "expm1", "log1p", "logaddexp", "tanh")


def kernels(operations):
    """The pairs of an operation and an implementation that this machine runs or interprets."""
    return [
        (operation, implementation)
        for operation in operations
        for implementation, module in dispatch.IMPLEMENTATIONS[operation].items()
        if not isinstance(module, str) and native.runs(implementation)
    ]


def parametrize_kernels(kernels, nightly=lambda kernel: kernel[1] in SLOW):
    """Parametrizes a test over pairs of an operation and an implementation."""
    marks = {kernel: pytest.mark.nightly if nightly(kernel) else () for kernel in kernels}
    params = [pytest.param(*kernel, marks=mark) for kernel, mark in marks.items()]
    return pytest.mark.parametrize(("operation", "implementation"), params)


def every_implementation(operation):
    """Parametrizes a test over the implementations of one operation."""
    names = [implementation for _, implementation in kernels([operation])]
    params = [pytest.param(n, marks=pytest.mark.nightly if n in SLOW else ()) for n in names]
    return pytest.mark.parametrize("implementation", params)


def check(operation, implementation, drawn, defined=None):
    """Raises an AssertionError if an implementation is too wrong for these inputs."""
    # Neighbors of a quantized row may be rounded to other integers.
    neighbors = 0 if operation == "norm_quantized_linear" else NEIGHBORS
    results = run(operation, implementation, drawn)
    compare(operation, implementation, drawn, results, neighbors, defined=defined)


def run(operation, implementation, drawn, compiled=False):
    """{name: float64 array} of the results and of the gradients of all arguments."""
    kernel = kernel_of(operation, implementation)
    with native.precision(drawn.precision), native.interpreted(implementation):
        return native.run(kernel, drawn, compiled)


@functools.cache
def kernel_of(operation, implementation):
    """A function that computes an operation. It skips the test if the arguments are unsupported."""

    def kernel(**arguments):
        reason = unsupported_reason(operation, implementation, arguments)
        if reason is not None:
            pytest.skip(f"{implementation} does not run: {reason}")
        return function_of(operation, implementation)(**arguments)

    return kernel


def function_of(operation, implementation):
    """The function of an implementation, which does not check its arguments."""
    return dispatch.IMPLEMENTATIONS[operation][implementation].function


def unsupported_reason(operation, implementation, arguments):
    """Reason why an implementation does not support arguments, or None."""
    unsupported = dispatch.IMPLEMENTATIONS[operation][implementation].unsupported
    return unsupported(**arguments) if unsupported else None


def module_of(operation, implementation):
    """The module of an implementation, whose constants tests may replace."""
    return importlib.import_module(f"keras_recurrent.backends.{implementation}.{operation}")


def compare(
    operation, implementation, drawn, results, neighbors=0, floor=0.0, extra=None, defined=None
):
    """Raises an AssertionError that names the first result that is too wrong.

    neighbors: how many neighbors of the inputs, and of the inputs and the gradients of results,
        also count if an error exceeds the bound of the inputs themselves. The largest bound holds.
    floor: errors up to it are allowed.
    extra: {name of a result: error that is allowed in addition}.
    defined: `definition(operation, drawn)` of the caller, whose results are reused.
    """
    defined = defined or definition(operation, drawn)
    truth = defined(exact(drawn))
    for name in truth:
        assert np.isfinite(results[name]).all(), f"{name}: not finite"
    wrong = errors(drawn, truth, results)
    allowed = tolerances(operation, implementation, drawn, defined)
    for near in neighbors_of(drawn, neighbors):
        if all(wrong[name] <= allowed[name] + floor for name in wrong):
            break
        more = tolerances(operation, implementation, near, definition(operation, near))
        allowed = {name: max(allowed[name], more[name]) for name in allowed}
    for name in wrong:
        bound = allowed[name] + floor + (extra or {}).get(name, 0)
        assert wrong[name] <= bound, f"{name}: error {wrong[name]:.3g}, allowed {bound:.3g}"


def tolerances(operation, implementation, drawn, defined):
    """{name: the largest error that a result may have}."""
    truth = defined(exact(drawn))
    judged = {name: as_judged(drawn, name, array) for name, array in truth.items()}
    if implementation in (PLAIN, *INTERPRETED) or operation in JUDGED_AS_PLAIN:
        known = errors(drawn, truth, defined(drawn.precision))
    else:
        known = errors(drawn, truth, run(operation, PLAIN, drawn))
    # A state is one point of a path: it may be as wrong as the whole path.
    paths = {"final_state": "output", "gradient of initial_state": f"gradient of {drawn.output}"}
    paths |= {f"gradient of initial_state {part}": f"gradient of {t}" for part, t in PARTS.items()}
    return {
        name: 2 * max(error, known[paths.get(name, name)])
        + 2 * unit(dtype_of_last_place(drawn, name), np.abs(judged[name]).max(initial=0))
        for name, error in known.items()
    }


def errors(drawn, truth, results):
    """{name: the largest error of a result}."""
    wrong = {}
    for name, expected in truth.items():
        result, expected = (as_judged(drawn, name, array) for array in (results[name], expected))
        wrong[name] = float(np.abs(result - expected).max(initial=0))
    return wrong


def as_judged(drawn, name, result):
    """A result with zeros for outputs at padding, which have no meaning, and norms for squares."""
    if name == "squares":
        result = np.sqrt(result)
    if name.split()[0] in ("output", "squares") and drawn.padding is not None:
        return np.where(align(drawn.padding, result), 0, result)
    return result


def dtype_of_last_place(drawn, name):
    """The dtype of the units of an error: of operations with a state, the coarsest one."""
    dtype = drawn.dtype_of(name)
    coarsest = min((d for d in drawn.dtypes.values() if d in FLOATS), key=FLOATS.index)
    return coarsest if drawn.has_state and dtype in FLOATS else dtype


def exact(drawn):
    """The precision of the truth."""
    if drawn.precision != "float64":
        return "float64"
    if np.finfo("longdouble").nmant <= np.finfo("float64").nmant:
        pytest.skip("NumPy has no floats longer than float64 on this machine")
    return "longdouble"


def definition(operation, drawn):
    """`reference` as a function of the precision alone, which computes each only once."""
    return functools.cache(functools.partial(reference, operation, drawn))


def reference(operation, drawn, precision):
    """Results and gradients of the definition in a precision, rounded to the dtypes of a kernel."""
    module = module_of(operation, "reference")
    arguments = {**drawn.arguments, **drawn.options, "dtype": np.dtype(precision)}
    with np.errstate(over="ignore"), elementary_functions_of_the_gpu():
        results = flatten(drawn.name_results(getattr(module, operation)(**arguments)))
        if drawn.d_output is not None:
            cotangents = nest(drawn.cotangents).values()
            gradients = getattr(module, f"{operation}_gradient")(*cotangents, **arguments)
            names = [*drawn.tensors, *(["initial_state"] if drawn.has_state else [])]
            results |= flatten(
                {
                    f"gradient of {name}": gradient
                    for name, gradient in zip(names, gradients, strict=True)
                    if arguments[name] is not None
                }
            )
    if precision == exact(drawn):
        return results
    return {name: round_to(drawn.dtype_of(name), result) for name, result in results.items()}


@contextlib.contextmanager
def elementary_functions_of_the_gpu():
    """Replaces NumPy's functions in float32 by the GPU's, whose errors a loop on it would have."""
    with contextlib.ExitStack() as stack:
        for name in ELEMENTARY if has_gpu() else ():
            function = functools.partial(call_on_gpu, name, getattr(np, name))
            stack.enter_context(mock.patch.object(np, name, function))
        yield


def call_on_gpu(name, numpy_function, *arrays):
    result = numpy_function(*arrays)
    if result.dtype != "float32":
        return result
    arrays = [keras.ops.convert_to_tensor(np.asarray(a, "float32")) for a in arrays]
    return keras.ops.convert_to_numpy(getattr(keras.ops, name)(*arrays))


def neighbors_of(drawn, count):
    """Yields neighbors of the arguments, then neighbors of the arguments and of `d_output`."""
    for seed in range(count):
        yield neighbor(drawn, seed, move_cotangents=False)
    for seed in range(count, 2 * count if drawn.d_output is not None else 0):
        yield neighbor(drawn, seed, move_cotangents=True)


def neighbor(drawn, seed, move_cotangents):
    """The inputs with each number moved by at most one unit in the last place."""
    rng = np.random.default_rng(seed)

    def move(arrays):
        flat = flatten(arrays)
        moved = {n: move_array(rng, array, drawn.dtype_of(n)) for n, array in flat.items()}
        return arrays | nest(moved)

    near = drawn._replace(tensors=move(drawn.tensors))
    if drawn.has_state:
        near = near._replace(**move({"initial_state": drawn.initial_state}))
    if move_cotangents:
        moved = move({"output": drawn.d_output, "final_state": drawn.d_final_state})
        near = near._replace(d_output=moved["output"], d_final_state=moved["final_state"])
    return near


def move_array(rng, tensors, dtype):
    def move(array):
        if dtype not in cases.EPSILON:
            return array
        units = rng.integers(-1, 2, np.shape(array))
        return round_to(dtype, array * (1 + units * cases.EPSILON[dtype]))

    return map_tensors(move, tensors)
