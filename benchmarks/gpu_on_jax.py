"""Times operations on a CUDA GPU on JAX, for `benchmarks.gpu`: a line of JSON in, one out.

JAX cannot time its work on a GPU by events, so its profiler does: the time of a call is the sum of
what the GPU ran for it.
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
    """An array whose bits a file of NumPy holds, which has no bfloat16."""
    array = jnp.asarray(np.load(file))
    return array.view(dtype) if dtype == "bfloat16" else array


def device_ms(program, arguments):
    """The GPU's time for one of the calls of a program."""
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

    return statistics.median(milliseconds() for _ in range(5)) / CALLS


def wall_ms(program, *arguments):
    def seconds(repeats):
        start = time.perf_counter()
        for _ in range(repeats):
            results = program(*arguments)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / repeats

    repeats = max(1, min(10, int(0.1 / seconds(1))))
    return 1000 * statistics.median(seconds(repeats) for _ in range(5))


def measure(implementation, work, arrays):
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

    (output,) = jax.eval_shape(forward, *arrays)
    d_output = jnp.ones(output.shape, output.dtype)
    start = time.perf_counter()
    compiled = jax.jit(both).lower(d_output, *arrays).compile()
    jax.block_until_ready(compiled(d_output, *arrays))
    first = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "forward": device_ms(jax.jit(forward), arrays),
        "both": device_ms(compiled, [d_output, *arrays]),
        "wall": wall_ms(compiled, d_output, *arrays),
        "peak": (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20,
        "first": first,
    }


def main():
    for line in sys.stdin:
        work = json.loads(line)
        arrays = [load(*of) for of in work["tensors"]]
        module = dispatch.IMPLEMENTATIONS[work["operation"]]["triton"]
        refused = module.unsupported(*arrays, **work["options"]) if not work["tied"] else None
        chosen = IMPLEMENTATIONS[bool(refused) :]
        print(json.dumps({name: measure(name, work, arrays) for name in chosen}), flush=True)


if __name__ == "__main__":
    main()
