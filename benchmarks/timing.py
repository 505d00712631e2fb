"""Measures times, memory and rates of the device, and prints results, for the other scripts."""

import ctypes
import datetime
import functools
import gc
import glob
import importlib.metadata
import json
import os
import re
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from guides.papers.runs import machine, table

BACKEND = keras.config.backend()
CALLS = 10  # of an operation whose rate is measured
PACKAGES = (
    *("keras", BACKEND, "libtpu", "triton"),
    *("flash-linear-attention", "transformers", "keras-hub"),
)

if BACKEND == "jax":
    import jax
elif BACKEND == "torch":
    import torch
else:
    import tensorflow as tf


# --- Results ---


def print_header(dtype):
    """Prints the device, the date and the versions."""
    installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    versions = [f"{p} {importlib.metadata.version(p)}" for p in PACKAGES if p in installed]
    print(f"{machine()}, {dtype}, {datetime.date.today()}, {', '.join(versions)}", flush=True)


def print_results(results):
    """Prints dictionaries as lines of JSON at once, and as Markdown tables at the end."""
    tables: dict = {}
    for result in results:
        print(json.dumps(result), flush=True)
        tables.setdefault(tuple(result), []).append(list(result.values()))
    for header, rows in tables.items():
        print("\n" + table(header, rows))


class Times(NamedTuple):
    """Median and quartiles of repeats."""

    median: float
    lower: float
    upper: float

    def __str__(self):
        return f"{self.median:.3f} ({self.lower:.3f} to {self.upper:.3f})"


def quartiles(values):
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Times(median, lower, upper)


# --- Times ---


def has_gpu():
    """Returns True on a GPU, and on a TPU."""
    return "CPU" not in machine()


def has_tpu():
    return "TPU" in machine()


def wait(result):
    """Waits until the device has computed a result, any structure."""
    if BACKEND == "jax":
        jax.block_until_ready(result)
    elif BACKEND == "torch" and torch.cuda.is_available():
        torch.cuda.synchronize()
    elif BACKEND == "tensorflow":
        for tensor in keras.tree.flatten(result):
            getattr(tensor, "numpy", int)()


def seconds(call, calls=1, clock=time.perf_counter):
    """Returns the time of a call."""
    start = clock()
    for _ in range(calls):
        result = call()
    wait(result)
    return (clock() - start) / calls


def seconds_between(prepare, few, many, clock=time.perf_counter):
    """Returns the seconds of a token: the difference of calls for many and for few tokens.

    It contains neither prefill nor the start of a call. `prepare` returns the call for a number of
    tokens.
    """
    longer, shorter = (seconds(prepare(number), clock=clock) for number in (many, few))
    return (longer - shorter) / (many - few)


def medians(calls, budget=6, least=5, most=50, clock=time.perf_counter):
    """Returns the median seconds of each call. Calls take turns, so that noise affects all.

    budget: the time for each call, in seconds; least, most: bounds of the number of repeats.
    """
    rounds = {}
    for name, call in calls.items():
        seconds(call)  # traces and compiles
        rounds[name] = min(most, max(least, round(budget / seconds(call))))
    times: dict = {name: [] for name in calls}
    for i in range(max(rounds.values())):
        for name, call in calls.items():
            if i < rounds[name]:
                times[name].append(seconds(call, clock=clock))
    return {name: statistics.median(found) for name, found in times.items()}


def wall_ms(call):
    """Returns the wall time of one call: Python, launches and the device."""
    calls = max(1, min(10, int(0.05 / seconds(call))))
    return quartiles([1000 * seconds(call, calls) for _ in range(5)])


def device_ms(call):
    """Returns the device's time for one call, without launches; on a CPU or TPU, the wall time."""
    wait(call())
    if not has_gpu() or has_tpu() or BACKEND == "tensorflow":
        return wall_ms(call)
    return _event_ms(call) if BACKEND == "torch" else _profiler_ms(call)


def _event_ms(call, repeats=7):
    """Measures by CUDA events around calls that are queued while the GPU is busy."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    began = time.perf_counter()
    call()
    milliseconds = 1000 * (time.perf_counter() - began)  # launch time on the host
    stop.record()
    torch.cuda.synchronize()
    calls = max(1, min(20, int(30 / start.elapsed_time(stop))))
    found = []
    for _ in range(repeats):
        torch.cuda._sleep(int(2_000_000 * (1 + 1.5 * milliseconds) * calls))  # cycles, 2 GHz
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop) / calls)
    return quartiles(found)


def _profiler_ms(call, calls=5):
    """Sums the GPU's work in profiles, as JAX has no timing events."""

    def milliseconds():
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready([call() for _ in range(calls)])
            (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
            data = jax.profiler.ProfileData.from_file(file)
            streams = (
                line
                for plane in data.planes
                if "GPU" in plane.name
                for line in plane.lines
                if "Stream" in line.name
            )
            return sum(event.duration_ns for line in streams for event in line.events) / 1e6

    return quartiles([milliseconds() / calls for _ in range(5)])


def compile_forward(function, model=None, donate=(), xla=True):
    """Returns a function of tensors without gradients, compiled on JAX and TensorFlow.

    model: a model whose layers are called.
    donate: numbers of the arguments that JAX may overwrite.
    """
    if BACKEND == "torch":
        return torch.no_grad()(function)
    if BACKEND == "tensorflow":
        return tf.function(function, jit_compile=xla)

    def run(weights, *arguments, **options):
        with keras.StatelessScope(zip(variables, weights, strict=True)):
            return function(*arguments, **options)

    # Weights are arguments, because a compiler would copy constants of gigabytes.
    variables = [] if model is None else model.variables
    weights = [variable.value for variable in variables]
    program = jax.jit(run, donate_argnums=[1 + number for number in donate])
    return functools.partial(program, weights)


# --- Memory ---


def reset_peak():
    """Starts a measurement of `peak_bytes`; returns the bytes in use."""
    gc.collect()  # only the garbage collector frees a Keras model's reference cycles
    if not has_gpu():
        ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the peak
        return _process_bytes("VmRSS")
    if BACKEND == "torch":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return jax_bytes("bytes_in_use")


def peak_bytes():
    """Returns the peak of the bytes in use; on JAX and a GPU since the process started."""
    if not has_gpu():
        return _process_bytes("VmHWM")
    if BACKEND == "torch":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return jax_bytes("peak_bytes_in_use")


def _process_bytes(field):
    with open("/proc/self/status") as file:
        (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", file.read())
    return 1024 * int(kilobytes)


def jax_bytes(field):
    """Returns a field of the memory statistics of an accelerator."""
    return jax.local_devices()[0].memory_stats()[field]


def is_out_of_memory(error):
    """Returns True for the out-of-memory errors of all frameworks."""
    said = f"{type(error).__name__}: {error}"
    return any(word in said for word in ("OutOfMemory", "out of memory", "RESOURCE_EXHAUSTED"))


# --- Rates ---


def device_rates(dtype="float32"):
    """Measures the bytes per second of a copy and the FLOP/s of a large product."""
    n = 8192 if has_gpu() else 1024
    x = ops.cast(keras.random.normal((n, n)), dtype)

    def best(function):
        return min(seconds(function, CALLS) for _ in range(6))  # the device is not idle in between

    def copy_rate():
        long = ops.zeros((2**28,), "float32")
        return 2 * 4 * long.shape[0] / best(lambda: long + 1.0)

    return {
        "bytes_per_second": copy_rate() if has_gpu() else _host_copy_rate(),
        "flops_per_second": 2 * n**3 / best(lambda: ops.matmul(x, x)),
    }


def _host_copy_rate():
    """Measures the bytes per second of a copy in the host's memory, read and written.

    Frameworks allocate the result of an operation, which takes longer than the copy itself. The
    arrays of this copy are allocated in advance. It has as many threads as the framework uses.
    """
    is_torch = BACKEND == "torch"
    threads = torch.get_num_threads() if is_torch else len(os.sched_getaffinity(0))
    source, target = (np.full((threads, 2**28 // threads), n, "uint8") for n in (1, 2))
    with ThreadPoolExecutor(threads) as pool:
        times = [seconds(lambda: list(pool.map(np.copyto, target, source))) for _ in range(CALLS)]
    return 2 * source.size / min(times)


def random_tokens(vocabulary, *shape):
    """Returns random token ids other than 0, in NumPy."""
    return np.random.default_rng(0).integers(1, vocabulary, shape).astype("int32")
