"""Times operations on a CUDA GPU on JAX for `benchmarks.gpu`: JSON lines in, JSON lines out.

JAX has no timing events, so its profiler is used: the time of a call is the sum of the GPU's work
for it. A sample of each result is written to a file first, for comparison; memory is full of NaN
before.
"""

import glob
import json
import os
import statistics
import sys
import tempfile
import time

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from keras_recurrent import dispatch

IMPLEMENTATIONS = ("triton", "jax")
CALLS = 5  # in one profile


def load(file, dtype):
    """Loads an array from the bits in a NumPy file, because NumPy has no bfloat16."""
    array = jnp.asarray(np.load(file))
    return array.view(dtype) if dtype == "bfloat16" else array


def device_ms(program, arguments):
    """Returns the GPU's time for one call of a program."""
    jax.block_until_ready(program(*arguments))

    def milliseconds():
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready([program(*arguments) for _ in range(CALLS)])
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

    return quartiles([milliseconds() / CALLS for _ in range(5)])


def quartiles(milliseconds):
    """Returns the median and the first and third quartile."""
    lower, median, upper = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return median, lower, upper


def wall_ms(program, *arguments):
    def seconds(repeats):
        start = time.perf_counter()
        for _ in range(repeats):
            results = program(*arguments)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / repeats

    repeats = max(1, min(10, int(0.1 / seconds(1))))
    return quartiles([1000 * seconds(repeats) for _ in range(5)])


def poison():
    """Fills the memory of the next arrays with NaN."""
    jax.block_until_ready(jnp.full((2**32,), jnp.nan, jnp.float32))


def save(file, results):
    """Saves a sample of each result, as `benchmarks.gpu_checks.sampled` does."""
    flat = (x.ravel()[:: 1 | (x.size >> 20)] for x in results)
    np.savez(file, *(np.asarray(x.astype("float32")) for x in flat))
    return f"{file}.npz"


def measure(implementation, work, d_output, arrays):
    operation = work["operation"]
    kernel = getattr(dispatch.IMPLEMENTATIONS[operation][implementation], operation)

    def forward(*arrays):
        if work["tied"]:
            arrays = (arrays[0], None, *arrays[1:])
        results = kernel(*arrays, **work["options"])
        return (results[0] if isinstance(results, tuple) else results,)

    def both(d_output, *arrays):
        (output,), pull_back = jax.vjp(forward, *arrays)
        gradients = pull_back((d_output,))
        return output, *(g for g in gradients if g.dtype != jax.dtypes.float0)

    poison()
    start = time.perf_counter()
    compiled = jax.jit(both).lower(d_output, *arrays).compile()
    results = jax.block_until_ready(compiled(d_output, *arrays))
    first = time.perf_counter() - start
    samples = save(f"{work['samples']}_{implementation}", results)
    del results
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "samples": samples,
        "forward": device_ms(jax.jit(forward), arrays),
        "both": device_ms(compiled, [d_output, *arrays]),
        "wall": wall_ms(compiled, d_output, *arrays),
        "peak": (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20,
        "first": first,
    }


def main():
    for line in sys.stdin:
        work = json.loads(line)
        d_output, *arrays = (load(*of) for of in work["tensors"])
        module = dispatch.IMPLEMENTATIONS[work["operation"]]["triton"]
        refused = module.unsupported(*arrays, **work["options"]) if not work["tied"] else None
        chosen = IMPLEMENTATIONS[bool(refused) :]
        print(
            json.dumps({name: measure(name, work, d_output, arrays) for name in chosen}), flush=True
        )


if __name__ == "__main__":
    main()
