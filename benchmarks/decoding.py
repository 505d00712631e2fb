"""Measures decoding of Hawk, Griffin and MQA in large batches.

    KERAS_BACKEND=torch python -m benchmarks.decoding

Figures 1b and 4 of De et al. 2024 (arXiv:2402.19427), with `generate`, random weights and greedy
decoding. Throughput: sequences of 512 to 4,096 tokens from an empty prompt, here a start token; the
batch is doubled until memory is exhausted or a call would take longer than `--seconds`. Latency:
the time per token at batch size 16, from an empty prompt and after a prompt of 4,096 tokens. The
roofline of each is the least time that its bytes and operations can take (the paper's appendix F,
`keras_recurrent.models.decoding_time`) at the measured rates of this device.

The KV cache of global attention has the capacity that `generate` allocates: 64, 256, 1,024 tokens
and then powers of two, so 1,024 for sequences of 512. With `--memory`, the batch is the largest
power of two whose weights and caches fit; on a CPU, this argument is required.
"""

import argparse
import datetime
import gc
import importlib.metadata
import json
import statistics
import time

import keras
import numpy as np
from keras import ops

from guides.papers.runs import machine, table
from keras_recurrent import which_generation
from keras_recurrent.generation.lengths import bucket
from keras_recurrent.models import GriffinCausalLM, decoding_time, memory_sizes

KINDS = {"hawk": "Hawk", "griffin": "Griffin", "mqa": "MQA"}
CALLS = 10  # of an operation whose rate is measured
PLACES = 4  # positions in a sequence; the roofline is their mean, as caches grow linearly


def build(kind, size, dtype=None, **sizes):
    """Builds a language model with random weights; `sizes` override those of the preset."""
    model = GriffinCausalLM.from_preset(
        f"{kind}_{size}", load_weights=False, preprocessor=None, dtype=dtype, **sizes
    )
    model.compile(sampler="greedy")
    return model


# --- Time ---


def seconds_of_call(model, batch, given, length, clock=time.perf_counter):
    """Times `generate` for sequences with `given` of `length` tokens."""
    vocabulary = model.backbone.vocabulary_size
    token_ids = np.random.default_rng(0).integers(1, vocabulary, (batch, length))
    mask = np.broadcast_to(np.arange(length) < given, token_ids.shape)
    inputs = {"token_ids": (token_ids * mask).astype("int32"), "padding_mask": mask}
    start = clock()
    written = model.generate(inputs, stop_token_ids=None)
    ops.convert_to_numpy(written["token_ids"])
    return clock() - start


def warm_up(model, batch, tokens, prompt=0):
    """Compiles the programs of `seconds_a_token`, with the fewest tokens of the same capacity."""
    given, length = max(prompt, 1), prompt + tokens
    shortest = length
    while shortest > given + 1 and bucket(shortest - 1) == bucket(length):
        shortest -= 1
    seconds_of_call(model, batch, given, shortest)
    if prompt and bucket(given + 1) != bucket(length):
        seconds_of_call(model, batch, given, given + 1)


def seconds_a_token(model, batch, tokens, prompt=0, clock=time.perf_counter):
    """Returns the time per decoding step of the batch.

    After a prompt, the time of prefill and one token is subtracted.
    """
    given = max(prompt, 1)
    seconds = seconds_of_call(model, batch, given, prompt + tokens, clock)
    if prompt:
        seconds -= seconds_of_call(model, batch, given, given + 1, clock)
    return seconds / (tokens - 1)


# --- Batch size ---


def largest_batch(model, tokens, memory):
    """Returns the largest power of two whose weights and caches fit into `memory` bytes."""
    sizes = memory_sizes(model, 1, bucket(tokens))
    fit = int((memory - sizes.parameters) // sizes.cache)
    if fit < 1:
        raise SystemExit(
            f"Weights of {sizes.parameters:,} bytes and a cache of {sizes.cache:,} for a single "
            f"row of {tokens:,} tokens are more than a memory of {memory:,.0f} bytes: take more "
            "--memory, or shorter rows."
        )
    return 1 << fit.bit_length() - 1


def doubled(model, tokens, first, longest):
    """Returns `([(batch, seconds per token), ...], reason to stop)`: "memory" or "time".

    "time": a call with twice the batch may take longer than `longest` seconds. "memory": weights
    and caches of twice the batch exceed the device's memory, or the framework raised an error.
    """
    memory = device_memory()

    def fits(batch):
        return memory is None or memory_sizes(model, batch, bucket(tokens)).total < memory

    found, batch = [], first
    while fits(batch):
        try:
            warm_up(model, batch, tokens)
            seconds = seconds_a_token(model, batch, tokens)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        found.append((batch, seconds))
        batch *= 2
        if fits(batch) and 2 * seconds * tokens > longest:
            return found, "time"
    if not found:
        raise SystemExit(f"{first} rows of {tokens:,} tokens do not fit: begin with fewer rows.")
    return found, "memory"


def device_memory():
    """Returns the bytes of the GPU's memory, or None if unknown."""
    if "CPU" in machine():
        return None
    if keras.config.backend() == "torch":
        import torch

        return torch.cuda.get_device_properties().total_memory
    if keras.config.backend() == "jax":
        import jax

        return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None


def is_out_of_memory(error):
    """Returns True for the out-of-memory errors of all frameworks."""
    said = f"{type(error).__name__}: {error}"
    return any(word in said for word in ("OutOfMemory", "out of memory", "RESOURCE_EXHAUSTED"))


# --- The roofline ---


def device_rates(dtype="float32"):
    """Measures the bytes per second of a copy and the FLOP/s of a large product."""
    on_gpu = "CPU" not in machine()
    n = 8192 if on_gpu else 1024
    x = ops.cast(keras.random.normal((n, n)), dtype)
    long = ops.zeros((2**28 if on_gpu else 2**24,), "float32")

    def best(function):
        times = []
        for _ in range(6):
            start = time.perf_counter()
            for _ in range(CALLS):  # the device is not idle in between
                result = function()
            ops.convert_to_numpy(result[:1])
            times.append((time.perf_counter() - start) / CALLS)
        return min(times)

    return {
        "bytes_per_second": 2 * 4 * long.shape[0] / best(lambda: long + 1.0),
        "flops_per_second": 2 * n**3 / best(lambda: ops.matmul(x, x)),
    }


def least_seconds_a_token(model, batch, tokens, prompt=0, **rates):
    """Returns the mean of `decoding_time` along the sequence."""
    places = prompt + tokens * (np.arange(PLACES) + 0.5) / PLACES
    times = (decoding_time(model, batch, max(1, int(place)), **rates) for place in places)
    return statistics.mean(found.total for found in times)


# --- The paper's tables ---


def throughput(model, tokens, arguments, rates):
    """Returns a table line: the batch with the highest tokens/s, the largest one, the roofline."""
    if arguments.memory:
        batch = largest_batch(model, tokens, arguments.memory * 2**30)
        warm_up(model, batch, tokens)
        found, ended = [(batch, seconds_a_token(model, batch, tokens))], "--memory"
    else:
        found, ended = doubled(model, tokens, arguments.rows, arguments.seconds)
    batch, seconds = max(found, key=lambda pair: pair[0] / pair[1])
    least = least_seconds_a_token(model, batch, tokens, **rates)
    return {
        "tokens": tokens,
        "largest batch": found[-1][0],
        "ended by": ended,
        "best batch": batch,
        "tokens/s": round(batch / seconds),
        "roofline tokens/s": round(batch / least),
    }


def latency(model, prompt, tokens, arguments, rates):
    """Returns a table line: median milliseconds per token, and the roofline."""
    batch = arguments.latency_rows
    warm_up(model, batch, tokens, prompt)
    times = [seconds_a_token(model, batch, tokens, prompt) for _ in range(arguments.repeats)]
    least = least_seconds_a_token(model, batch, tokens, prompt, **rates)
    return {
        "prompt": prompt,
        "tokens": tokens,
        "rows": batch,
        "ms a token": round(1000 * statistics.median(times), 3),
        "roofline ms": round(1000 * least, 3),
    }


def measured(model, arguments, rates):
    """Yields the lines of both tables for a model, each with the name of its table."""
    for tokens in arguments.tokens:
        yield "throughput", throughput(model, tokens, arguments, rates)
    for prompt in arguments.prompts:
        for tokens in arguments.tokens:
            yield "latency", latency(model, prompt, tokens, arguments, rates)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--size", default="1.3b", help="of the presets, such as tiny or 100m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--prompts", type=int, nargs="*", default=[0, 4096], help="of latency")
    parser.add_argument("--latency-rows", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64, help="batch size to start doubling at")
    parser.add_argument("--seconds", type=float, default=60, help="limit of a call")
    parser.add_argument("--memory", type=float, help="GiB, instead of what the device has")
    parser.add_argument("--repeats", type=int, default=3, help="of latency")
    arguments = parser.parse_args()
    if min(arguments.tokens) < 2:
        parser.error("--tokens must be at least 2, of which the first is given")
    if not arguments.memory and "CPU" in machine():
        parser.error("on a CPU, --memory must say how much of it to take, in GiB")
    rates = device_rates(arguments.dtype)
    versions = {n: importlib.metadata.version(n) for n in ("keras", keras.config.backend())}
    print(f"{machine()}, {arguments.dtype}, {datetime.date.today()}, {versions}")
    print(
        f"It copies at {rates['bytes_per_second'] / 1e9:,.0f} GB/s and multiplies at "
        f"{rates['flops_per_second'] / 1e12:,.2f} TFLOP/s."
    )
    tables: dict = {"throughput": [], "latency": []}
    for kind in arguments.kinds:
        model = build(kind, arguments.size, arguments.dtype)
        name = f"{KINDS[kind]} {arguments.size}"
        for what, line in measured(model, arguments, rates):
            tables[what].append({"model": name, **line})
            print(json.dumps(tables[what][-1]), flush=True)
        print(f"{name} wrote by: {which_generation(model)}")
        del model
        gc.collect()
    for lines in filter(None, tables.values()):
        print("\n" + table(list(lines[0]), [list(line.values()) for line in lines]))


if __name__ == "__main__":
    main()
