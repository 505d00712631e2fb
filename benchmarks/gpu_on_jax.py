"""Times operations on a CUDA GPU on JAX, for `benchmarks.gpu`: prints a line of JSON for each.

A program calls an operation several times, each time on what the last one returned, so that none
is left out and none waits for the host; programs queue up. So the time of a call is the GPU's.
"""

import json
import os
import statistics
import sys
import time

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from keras_recurrent import dispatch

CALLS = 4  # of a program


def tensors(given, key):
    """Arrays of the shapes, dtypes and kinds that `benchmarks.gpu` names."""
    arrays = []
    for shape, dtype, kind in given:
        key, own = jax.random.split(key)
        if kind == "decays":
            spread = jnp.logspace(-4, 1, shape[-1])
            array = -jnp.abs(jax.random.normal(own, shape)) * spread
        elif kind == "slopes":
            array = -8 / shape[0] * jnp.arange(shape[0])
        elif kind == "logits of decays":
            array = jnp.linspace(2, 9, shape[0])
        else:
            array = jax.random.normal(own, shape)
        arrays.append(array.astype(dtype))
    return arrays


def repeated(call, replaced):
    """A program of several calls: results go where arguments were, {argument: result}."""

    def program(*arguments):
        results = []
        for _ in range(CALLS):
            result = call(*arguments)
            results.append(result)
            arguments = list(arguments)
            for argument, number in replaced.items():
                arguments[argument] = result[number].astype(arguments[argument].dtype)
        return results

    return jax.jit(program)


def milliseconds(program, arguments):
    """The time of one of the calls of a program."""
    jax.block_until_ready(program(*arguments))

    def seconds(repeats):
        start = time.perf_counter()
        for _ in range(repeats):
            results = program(*arguments)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / repeats

    repeats = max(2, min(20, int(0.05 / seconds(2))))
    return 1000 / CALLS * statistics.median(seconds(repeats) for _ in range(5))


def measure(operation, implementation, arrays, tied, options, chained):
    kernel = getattr(dispatch.IMPLEMENTATIONS[operation][implementation], operation)

    def forward(*arrays):
        if tied:
            arrays = (arrays[0], None, *arrays[1:])
        return kernel(*arrays, **options)[:1]

    def both(d_output, *arrays):
        (output,), pull_back = jax.vjp(forward, *arrays)
        return output, *pull_back((d_output,))

    d_output = jnp.ones_like(jax.eval_shape(forward, *arrays)[0])
    start = time.perf_counter()
    compiled = jax.jit(both).lower(d_output, *arrays).compile()
    jax.block_until_ready(compiled(d_output, *arrays))
    first = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return {
        "forward": milliseconds(repeated(forward, {chained: 0}), arrays),
        "both": milliseconds(repeated(both, {0: 1 + chained, 1 + chained: 0}), [d_output, *arrays]),
        "peak": (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20,
        "first": first,
    }


def main():
    for line in sys.stdin:
        work = json.loads(line)
        arrays = tensors(work.pop("tensors"), jax.random.key(0))
        figures = {}
        for implementation in work["implementations"]:
            try:
                figures[implementation] = measure(
                    work["operation"],
                    implementation,
                    arrays,
                    work["tied"],
                    work["options"],
                    work["chained"],
                )
            except Exception as error:
                figures[implementation] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
