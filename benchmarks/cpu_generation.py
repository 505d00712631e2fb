"""Measures the CPU time of calls of `generate` and `stream` with a small trained model.

    KERAS_BACKEND=torch OMP_NUM_THREADS=1 python -m benchmarks.cpu_generation

Prints one line of JSON: milliseconds of CPU time, with child processes, of the first call in this
process and medians of later calls. Answers have 64 tokens of text from `griffin_tiny_text`. The
time to the first token of a stream is wall time.
"""

import functools
import json
import os
import statistics
import time

from keras_recurrent.models import GriffinCausalLM, SamplingParams

TEXT = "What is the time o' the day? Past the mid season. At least two glasses."
NEW_TOKENS, RUNS = 64, 3
GREEDY = SamplingParams(temperature=0)
RANDOM = {"sampling": SamplingParams(temperature=1, top_k=40, seed=0)}


def cpu_seconds():
    """Returns the CPU time so far of this process and of its children that have ended."""
    return time.process_time() + sum(os.times()[2:4])


def cpu_milliseconds(function):
    start = cpu_seconds()
    function()
    return 1000 * (cpu_seconds() - start)


def main():
    model = GriffinCausalLM.from_preset("griffin_tiny_text")
    load = 1000 * cpu_seconds()
    options = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": None, "sampling": GREEDY}
    generate = functools.partial(model.generate, **options)
    first_tokens = []

    def stream():
        start = time.perf_counter()
        chunks = model.stream(TEXT, **options)
        next(chunks)
        first_tokens.append(1000 * (time.perf_counter() - start))
        for _ in chunks:
            pass

    cases = {"stream": stream}
    for size, inputs in ((1, TEXT), (16, [TEXT[: 4 + 4 * row] for row in range(16)])):
        cases[f"generate, batch size {size}"] = functools.partial(generate, inputs)
        cases[f"generate, batch size {size}, top_k"] = functools.partial(generate, inputs, **RANDOM)
    cases["generate, a stop string"] = functools.partial(generate, TEXT, stop=["\n\n"])
    cases["generate, return_cache"] = functools.partial(generate, TEXT, return_cache=True)
    found = {"import and load": load, "first call": cpu_milliseconds(lambda: generate(TEXT))}
    for name, function in cases.items():
        function()
        found[name] = statistics.median(cpu_milliseconds(function) for _ in range(RUNS))
    found["first token of a stream, wall time"] = statistics.median(first_tokens[1:])
    print(json.dumps({f"{name}, ms": round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
