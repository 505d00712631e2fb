"""Times each operation on one backend, next to plain implementations and baselines.

On a GPU in bfloat16: the kernels, the plain implementation (on torch for the first shape only), and
installed baselines, which are flash-linear-attention and liger-kernel on torch, and
jax-linear-attention on JAX. On a TPU in bfloat16: the kernels, the plain implementation, and the
scans of JAX, as in figure 8 of De et al. 2024, arXiv:2402.19427. On a CPU in float32: the
recurrences by sequence length, and linear attention next to a loop over tokens.

Before it is timed, each implementation is compared with the plain one in float64, in memory full of
NaN. "Error" is the largest error of a result or gradient, as norms relative to it. Baselines with
large errors are not timed; of baselines whose gradients raise an error, the forward pass is timed.
The tests compare this package's kernels more strictly.

The floor is the time that the same device takes, in the same run, to copy what must be read and
written once or, if longer, to multiply matrices with the operation's products.
"""

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from benchmarks import make_parser, peers, read_shape
from benchmarks.timing import (
    BACKEND,
    compile_forward,
    device_ms,
    device_rates,
    has_gpu,
    has_tpu,
    jax_bytes,
    peak_bytes,
    print_header,
    print_results,
    reset_peak,
    seconds,
    wait,
    wall_ms,
)
from keras_recurrent import dispatch

if BACKEND == "jax":
    import jax
elif BACKEND == "torch":
    import torch
else:
    import tensorflow as tf

FAR_OFF = 0.05  # error of a result, relative to its size
MAX_POISON = 24 * 2**30  # bytes to fill with NaN
WINDOW = 2048

# --- Work ---

SCANS = [(8, 2048, 2560), (4, 8192, 2560), (1, 65536, 2560)]
HEADS = [(8, 2048, 16, 128), (4, 8192, 16, 128), (1, 65536, 16, 128)]
# Values of Mamba-2.
MAMBA_HEADS = [(8, 2048, 64, 64), (1, 65536, 64, 64)]
# A constant number of tokens in sequences of increasing length.
LENGTHS = [(2**17 // t, t, 16, 128) for t in (2**n for n in range(10, 18))]
# As in recurrentgemma_2b, whose query heads share one key head.
SOFTMAX_HEADS = [(8, 2048, 10, 256), (1, 16384, 10, 256)]
# Tokens × channels of hgrn2_1.3b_100b.
CHANNELS, INNER_CHANNELS = [(16384, 2048)], [(16384, 5632)]
# Tokens × GPT-2's vocabulary, rounded up to a multiple of 64.
VOCABULARY = [(16384, 50304)]
# Tokens, channels and vocabulary of RecurrentGemma 2B and HGRN2 1.3B.
LOSSES = [(16384, 2560, 256_000), (16384, 2048, 50304)]
CPU_SCANS = [(1, 1024 * 2**i, 1024) for i in range(7)]
CPU_HEADS = [(4, 2048, 4, 64), (1, 2048, 4, 128), *((1, 1024 * 2**i, 4, 64) for i in range(6))]


def normal(*shape, dtype="float32"):
    return ops.cast(keras.random.normal(shape), dtype)


def spread_decays(shape, dtype):
    """Returns log decays, from slow in the first channels to fast in the last."""
    spread = ops.logspace(-4, 1, shape[-1])
    return ops.cast(-ops.abs(normal(*shape)) * ops.cast(spread, "float32"), dtype)


def forget_gates(bound):
    """Returns a function that draws log forget gates above a bound, as in a layer of HGRN2."""

    def draw(shape, dtype):
        gate = ops.sigmoid(normal(*shape))
        return ops.cast(ops.log(bound + (1 - bound) * gate), dtype)

    return draw


class Work(NamedTuple):
    """An operation and its inputs.

    Attributes:
        operation: the name of the operation.
        tensors: function of a shape and a dtype, returns `{argument: tensor}`.
        moved: function of a shape, returns the numbers of elements that forward and backward must
            read and write.
        shapes, cpu_shapes: on a GPU and on a CPU.
        flops: function of a shape, returns the operations of forward and backward that count.
        options: the arguments that are not tensors.
    """

    operation: str
    tensors: Callable
    moved: Callable
    shapes: list
    cpu_shapes: list = []
    flops: Callable = lambda *shape: (0, 0)
    options: dict[str, Any] = {}


def count_tensors(forward, backward):
    """Returns a function of a shape: the elements of so many tensors of this shape."""
    return lambda *shape: (forward * math.prod(shape), backward * math.prod(shape))


def scan_tensors(shape, dtype):
    return {"x": normal(*shape, dtype=dtype), "log_a": spread_decays(shape, dtype)}


def rg_lru_tensors(shape, dtype):
    names = ("x", "gate_a", "gate_x")
    logits = {"a_logit": ops.linspace(2.0, 9.0, shape[-1])}
    return {**{name: normal(*shape, dtype=dtype) for name in names}, **logits}


def conv_tensors(shape, dtype):
    """Returns the arguments of a convolution; its parameters are float32, as in the layer."""
    width = shape[-1]
    return {"x": normal(*shape, dtype=dtype), "kernel": normal(4, width), "bias": normal(width)}


def gate_tensors(shape, dtype):
    bound = ops.linspace(0.1, 0.9, shape[-1])
    bounds = ops.stack([ops.log(bound), ops.log(1 - bound)])
    return {"logits": normal(*shape, dtype=dtype), "lower_bound": bounds}


def norm_tensors(shape, dtype):
    return {"x": normal(*shape, dtype=dtype), "scale": normal(shape[-1], dtype=dtype)}


def unit_tensors(shape, dtype):
    return {name: normal(*shape, dtype=dtype) for name in ("gate", "x")}


def logit_tensors(shape, dtype):
    tokens = keras.random.randint(shape[:1], 0, shape[1])
    return {"logits": normal(*shape, dtype=dtype), "tokens": tokens}


def loss_tensors(shape, dtype):
    count, width, vocabulary = shape
    embedding = ops.cast(normal(vocabulary, width) * width**-0.5, dtype)
    tokens = keras.random.randint((count,), 0, vocabulary)
    return {"x": normal(count, width, dtype=dtype), "embedding": embedding, "tokens": tokens}


def loss_flops(count, width, vocabulary):
    return 2 * count * width * vocabulary, 4 * count * width * vocabulary


def gated_tensors(shape, dtype, decays=spread_decays, names="qkv", decay_dtype=None):
    tensors = {name: normal(*shape, dtype=dtype) for name in names}
    return {**tensors, "log_f": decays(shape, decay_dtype or dtype)}


def lightning_tensors(shape, dtype):
    heads = shape[2]
    log_decay = -8.0 / heads * ops.arange(heads, dtype="float32")
    return {**{name: normal(*shape, dtype=dtype) for name in "qkv"}, "log_decay": log_decay}


def scalar_tensors(shape, dtype, is_constant):
    """Returns the arguments of Mamba-2: a shape is that of v, and 128 channels of q and k."""
    b, t, heads, _ = shape
    shared = {name: normal(b, t, 1, 128, dtype=dtype) for name in "qk"}
    # Step sizes from 0.001 to 0.1 and rates from 1 to 16, as at the start of a training.
    rate = ops.linspace(1.0, 16.0, heads)
    step = ops.exp(keras.random.uniform((b, t, heads), math.log(1e-3), math.log(0.1)))
    log_decay = -0.02 * rate if is_constant else -step * rate
    return {**shared, "v": normal(*shape, dtype=dtype), "log_decay": log_decay}


def scalar_moved(b, t, heads, values):
    """Counts v and the output, and of the backward v, its gradient and that of the output."""
    return b * t * (2 * heads * values + 256), b * t * (3 * heads * values + 512)


def softmax_tensors(shape, dtype):
    b, t, _, k = shape
    shared = {name: normal(b, t, 1, k, dtype=dtype) for name in "kv"}
    return {"q": normal(*shape, dtype=dtype) / k**0.5, **shared}


def softmax_flops(b, t, h, k, window):
    """Counts two products forward and five backward, for visible query-key pairs only."""
    hidden = max(0, t - (window or t))
    pairs = b * h * (t * (t + 1) - hidden * (hidden + 1)) // 2
    return 4 * pairs * k, 10 * pairs * k


def gated_work(names="qkv", shapes=HEADS, cpu_shapes=(), **options):
    tensors = functools.partial(gated_tensors, names=names, **options)
    moved = count_tensors(5, 9) if names == "qkv" else count_tensors(4, 7)
    given = {} if names == "qkv" else {"k": None}
    operation = "gated_linear_attention"
    return Work(operation, tensors, moved, shapes, list(cpu_shapes), options=given)


def scalar_work(is_constant):
    tensors = functools.partial(scalar_tensors, is_constant=is_constant)
    return Work(SCALAR, tensors, scalar_moved, MAMBA_HEADS, CPU_HEADS[:2])


def softmax_work(window, shapes):
    flops = functools.partial(softmax_flops, window=window)
    options = {"sliding_window": window}

    def moved(b, t, h, k):
        return b * t * k * (2 * h + 2), b * t * k * (4 * h + 4)

    operation = "sliding_window_attention"
    return Work(operation, softmax_tensors, moved, shapes, flops=flops, options=options)


def loss_work(shapes, **options):
    moved = count_tensors(0, 0)
    return Work("linear_crossentropy", loss_tensors, moved, shapes, [], loss_flops, options)


ENDS = [HEADS[0], HEADS[-1]]
GATED, LIGHTNING = "gated_linear_attention", "lightning_attention"
SCALAR = "scalar_decay_attention"
# The most important first, because a run may end early.
WORK = {
    GATED: gated_work(cpu_shapes=CPU_HEADS),
    # Lower bounds of forget gates; HGRN2's rise from 0 in the first layer to nearly 1 in the last.
    **{
        f"{GATED}, f from {bound}": gated_work(shapes=ENDS, decays=forget_gates(bound))
        for bound in (0.0, 0.5, 0.97)
    },
    # The dtype of `log_forget_gate` in the layers.
    f"{GATED}, f from 0.97, log f in float32": gated_work(
        decays=forget_gates(0.97), decay_dtype="float32"
    ),
    f"{GATED}, k=None": gated_work("qv"),
    f"{GATED}, k=None, f from 0.97": gated_work("qv", ENDS, decays=forget_gates(0.97)),
    f"sliding_window_attention of {WINDOW}": softmax_work(WINDOW, SOFTMAX_HEADS),
    # Without a window or a final state, as in baselines; the results are equal here.
    "sliding_window_attention to all tokens": softmax_work(None, SOFTMAX_HEADS[:1]),
    LIGHTNING: Work(LIGHTNING, lightning_tensors, count_tensors(4, 7), HEADS, CPU_HEADS),
    f"{LIGHTNING} of 131072 tokens": Work(
        LIGHTNING, lightning_tensors, count_tensors(4, 7), LENGTHS
    ),
    SCALAR: scalar_work(is_constant=False),
    f"{SCALAR}, constant decays": scalar_work(is_constant=True),
    "linear_scan": Work("linear_scan", scan_tensors, count_tensors(3, 5), SCANS, CPU_SCANS),
    "rg_lru": Work("rg_lru", rg_lru_tensors, count_tensors(4, 8), SCANS),
    "causal_conv1d": Work("causal_conv1d", conv_tensors, count_tensors(2, 3), SCANS[:1]),
    "causal_conv1d, silu": Work(
        *("causal_conv1d", conv_tensors, count_tensors(2, 3), SCANS[:1]),
        options={"activation": "silu"},
    ),
    "rms_norm": Work(
        *("rms_norm", norm_tensors, count_tensors(2, 3), CHANNELS), options={"epsilon": 1e-6}
    ),
    "gated_linear_unit, silu": Work(
        *("gated_linear_unit", unit_tensors, count_tensors(3, 5), INNER_CHANNELS),
        options={"activation": "silu"},
    ),
    # The result and its gradient are float32.
    "log_forget_gate": Work("log_forget_gate", gate_tensors, count_tensors(3, 4), CHANNELS),
    "token_crossentropy": Work(
        "token_crossentropy", logit_tensors, count_tensors(1, 2), VOCABULARY
    ),
    "linear_crossentropy, soft cap": loss_work(LOSSES[:1], soft_cap=30.0),
    "linear_crossentropy": loss_work(LOSSES),
}


# --- Implementations as programs of the backend ---


def run_by(name, work, names):
    """Returns the output of an implementation as a function of the tensors with these names."""

    def output(*tensors):
        arguments = {**dict(zip(names, tensors, strict=True)), **work.options}
        results = dispatch.run(work.operation, arguments, name)
        return results[0] if isinstance(results, tuple) else results  # without the final state

    return output


def supported_implementations(work, tensors):
    """Returns the names of implementations that accept the tensors, the plain one last."""
    names = [name for name in dispatch.BACKEND_PREFERENCE if has_gpu() and name != BACKEND]
    names = [name for name in names if (name == "pallas") == has_tpu()]
    arguments = {**tensors, **work.options}
    names = [n for n in names if dispatch.choose(work.operation, arguments, n).implementation]
    return [*names, BACKEND]


def is_float(tensor):
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))


def add_gradients(function):
    """Returns a function of (d_output, *tensors): the output, and gradients of float tensors."""
    if BACKEND == "jax":

        def both(d_output, *tensors):
            output, pull_back = jax.vjp(function, *tensors)
            gradients = pull_back(ops.cast(d_output, output.dtype))
            return output, *(g for g in gradients if g.dtype != jax.dtypes.float0)

    elif BACKEND == "torch":

        def both(d_output, *tensors):
            inputs = [t.detach().requires_grad_(is_float(t)) for t in tensors]
            output = function(*inputs)
            leaves, d_output = [t for t in inputs if t.requires_grad], d_output.to(output.dtype)
            # Some baselines ignore the decays, which then have no gradient.
            gradients = torch.autograd.grad(output, leaves, d_output, allow_unused=True)
            return output.detach(), *gradients

    else:

        def both(d_output, *tensors):
            leaves = [t for t in tensors if is_float(t)]
            with tf.GradientTape() as tape:
                tape.watch(leaves)
                output = function(*tensors)
            return output, *tape.gradient(output, leaves, ops.cast(d_output, output.dtype))

    return both


def compile_both(function, xla, arguments):
    """Returns the compiled `add_gradients`, on JAX for given arguments, to ask for its memory."""
    both = add_gradients(function)
    if BACKEND == "jax":
        return jax.jit(both).lower(*arguments).compile()
    return tf.function(both, jit_compile=xla) if BACKEND == "tensorflow" else both


# --- Correctness ---


def poison():
    """Fills the memory of the next tensors with NaN."""
    if has_gpu() and BACKEND == "torch":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        sizes = [min(MAX_POISON, free // 2) // 4, *(2**k for k in range(7, 18) for _ in range(4))]
        held = [torch.full((size,), math.nan, device="cuda") for size in sizes]
        del held
    elif has_gpu() and BACKEND == "jax":
        half = jax_bytes("bytes_limit") // 8  # of the memory, in numbers of 4 bytes
        wait(jax.numpy.full((min(half, 2**32),), jax.numpy.nan, "float32"))


def double_precision():
    return jax.enable_x64(True) if BACKEND == "jax" else contextlib.nullcontext()


def to_double(tensor):
    """Casts a float tensor to float64; copies all tensors of a TPU, which lacks it, to the CPU."""
    tensor = jax.device_put(tensor, jax.devices("cpu")[0]) if has_tpu() else tensor
    return ops.cast(tensor, "float64") if is_float(tensor) else tensor


def compute_truth(plain, arguments):
    """Returns the output and the gradients of the plain implementation in float64."""
    with double_precision():
        double = [to_double(tensor) for tensor in arguments]
        return compile_both(plain, False, double)(*double)


def largest_error(results, truth):
    """Returns the largest relative error of a result, NaN if any is NaN."""
    errors = []
    with double_precision():
        for result, expected in zip(results, truth, strict=True):
            if result is not None:  # a gradient that a baseline does not compute
                tensors = to_double(result) - expected, expected
                wrong, size = (float(ops.sqrt(ops.sum(ops.square(x)))) for x in tensors)
                errors.append(wrong / (size or 1))
    return float(np.max(errors))


def require_accuracy(error):
    if not error <= FAR_OFF:
        raise ValueError(f"wrong by {error:.1%} of the results' size")


# --- Measurement ---


def measure(function, arguments, truth, xla):
    """Returns the measurements of a function of the tensors, a dictionary."""
    poison()
    start = time.perf_counter()
    both = compile_both(function, xla, arguments)
    results = both(*arguments)
    wait(results)
    first = time.perf_counter() - start
    error = largest_error(results, truth)
    del results
    require_accuracy(error)
    if BACKEND == "jax" and has_gpu():
        memory = both.memory_analysis()
        peak = memory.temp_size_in_bytes + memory.output_size_in_bytes
    else:
        held = reset_peak()
        seconds(lambda: both(*arguments))
        peak = peak_bytes() - held
    forward = compile_forward(function, xla=xla)
    return {
        "forward ms": device_ms(lambda: forward(*arguments[1:])),
        "forward + backward ms": device_ms(lambda: both(*arguments)),
        "wall ms": wall_ms(lambda: both(*arguments)),
        "peak MiB": round(peak / 2**20),
        "first call s": round(first, 1),
        "error": f"{error:.1e}",
    }


def measure_forward(function, arguments, truth, xla):
    """Returns the measurements of a function without gradients, a dictionary."""
    poison()
    forward = compile_forward(function, xla=xla)
    error = largest_error([forward(*arguments[1:])], truth[:1])
    require_accuracy(error)
    return {"forward ms": device_ms(lambda: forward(*arguments[1:])), "error": f"{error:.1e}"}


def floors(work, shape, dtype, rates):
    """Returns the floor in milliseconds: forward, and forward and backward."""
    itemsize = 2 if dtype == "bfloat16" else 4
    forward, backward = (
        1000 * max(itemsize * m / rates["bytes_per_second"], f / rates["flops_per_second"])
        for m, f in zip(work.moved(*shape), work.flops(*shape), strict=True)
    )
    return {"forward ms": forward, "forward + backward ms": forward + backward}


def measure_shape(label, work, shape, arguments, rates):
    """Yields the results of all implementations for a shape."""
    keras.utils.set_random_seed(0)
    tensors = work.tensors(shape, arguments.dtype)
    plain = run_by(BACKEND, work, tensors)
    output = compile_forward(plain, xla=False)(*tensors.values())
    d_output = normal(*output.shape, dtype=output.dtype) if output.shape else ops.ones_like(output)
    given = d_output, *tensors.values()
    truth = compute_truth(plain, given)
    names = supported_implementations(work, tensors)
    if BACKEND == "torch" and has_gpu() and shape != work.shapes[0]:
        names.remove(BACKEND)
    functions = {name: run_by(name, work, tensors) for name in names}
    floor = floors(work, shape, arguments.dtype, rates)
    key = {"operation": label, "shape": "×".join(map(str, shape)), "dtype": arguments.dtype}
    baselines = peers.operation_baselines(work.operation, shape, work.options)
    for name, function in (functions | baselines).items():
        found = {}
        for measured in (measure, measure_forward):
            try:
                found = measured(function, given, truth, arguments.xla)
                break
            except Exception as reason:  # a baseline, or its gradient, may raise anything
                if name in functions:
                    raise
                failed = f"{measured.__name__} failed: {label}, {shape}, {name}: {reason}"
                print(failed, file=sys.stderr, flush=True)
        if not found:
            continue
        shares = {p: f for p, f in floor.items() if f and p in found}
        shares = {f"{p} / floor": round(found[p].median / f, 2) for p, f in shares.items()}
        result = {**key, "implementation": name, **found, **shares}
        yield {k: str(v) if isinstance(v, tuple) else v for k, v in result.items()}


def measure_all(arguments):
    end = time.monotonic() + arguments.seconds
    rates = device_rates(arguments.dtype)
    for label, work in WORK.items():
        if arguments.operations and work.operation not in arguments.operations:
            continue
        first = next(each for each in WORK.values() if each.operation == work.operation)
        if arguments.first and work is not first:
            continue
        for shape in arguments.shapes or (work.shapes if has_gpu() else work.cpu_shapes):
            if time.monotonic() > end:
                print(f"not begun as time is up: {label} {shape}", file=sys.stderr)
                continue
            yield from measure_shape(label, work, shape, arguments, rates)


def main():
    parser = make_parser(__doc__)
    names = {work.operation for work in WORK.values()}
    parser.add_argument("operations", nargs="*", metavar="operation", help=", ".join(sorted(names)))
    parser.add_argument(
        "--first", action="store_true", help="only the first kind of inputs of an operation"
    )
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU or TPU, float32 on a CPU")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing afterwards")
    parser.add_argument("--shapes", nargs="+", type=read_shape, help="such as 8x2048x16x128")
    parser.add_argument("--xla", action="store_true", help="on TensorFlow")
    arguments = parser.parse_args()
    if unknown := set(arguments.operations) - names:
        parser.error(f"there is no operation {', '.join(sorted(unknown))}")
    arguments.dtype = arguments.dtype or ("bfloat16" if has_gpu() else "float32")
    if BACKEND == "torch" and has_gpu():
        peers.compile_side_by_side()
    print_header(arguments.dtype)
    print_results(measure_all(arguments))


if __name__ == "__main__":
    main()
