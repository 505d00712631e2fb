"""Throughput and latency of generation (Griffin, section 5, figures 1b and 4, appendix F).

A decoding step reads all weights and the cache of every sequence. The cache of multi-query
attention (MQA) grows with the text, so that longer texts leave memory for smaller batches; the
caches of Hawk and Griffin stop growing.

The first part computes a roofline for the paper's sizes and TPU-v3, from the bytes of the arrays.
The second part measures `generate`. The miniature uses tiny models and assumes a memory of a few
megabytes, which limits the batch size. On a CPU times are process times, because other programs may
run.
"""

import functools
import gc
import itertools
import time

import keras
import numpy as np
from constant_speed import GPU, room
from runs import Panel, clear, machine, yes

from benchmarks.decoding import PLACES, decoding_time, least_seconds_a_token, seconds_a_token
from benchmarks.models import make_model
from benchmarks.timing import device_rates, is_out_of_memory
from keras_recurrent.generation.prompts import bucket
from keras_recurrent.models import memory_sizes

KINDS = {"hawk": "Hawk", "griffin": "Griffin", "mqa": "MQA"}
TPU_V3 = {"bytes_per_second": 900e9, "flops_per_second": 123e12}  # the paper's table 3
RATES = {"bytes and operations": TPU_V3, "bytes only": {**TPU_V3, "flops_per_second": 1e30}}
TPU_V3_MEMORY = 32e9
# Figure 1b: tokens/s relative to MQA, by the number of generated tokens.
PAPER = {
    "hawk": {512: 2.5, 1024: 4.1, 2048: 7.3, 4096: 14.8},
    "griffin": {512: 1.1, 1024: 1.8, 2048: 3.3, 4096: 6.6},
}
LENGTHS = [2**i for i in range(8, 18)]  # lengths whose caches are computed
SIZES = {  # lengths are tokens
    "preset": ("tiny", "1.3b"),  # suffix of the preset, after the model's name
    "dtype": ("float32", "bfloat16"),
    "window": (128, 1024),  # of Griffin's local attention
    "tokens": ((64, 256, 1024), (512, 1024, 2048, 4096)),  # from an empty prompt, largest batch
    "memory": (6 * 2**20, 0),  # bytes for weights and caches; 0: the device's memory
    "latency_rows": (16, 16),
    "latency_tokens": ((256, 1024), (512, 4096)),  # to generate after each of the prompts
    "prompts": ((0, 1024), (0, 4096)),
    "first_rows": (64, 512),  # first batch size, which doubles if `memory` is 0
    "longest_call": (60.0, 10.0),  # seconds; doubling ends when a call would take longer
}


# --- 1. Roofline for the paper's sizes and device ---


def roofline():
    """Returns the panels of cache sizes, and of tokens/s relative to MQA."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        found = {kind: computed_speeds(f"{kind}_1.3b") for kind in KINDS}
        caches = {
            name: {n: [cache_bytes(f"{kind}_1.3b", n) / 1e6] for n in LENGTHS}
            for kind, name in KINDS.items()
        }
    finally:
        keras.config.set_dtype_policy(policy)
    factors: dict = {}
    for kind, paper in PAPER.items():
        factors[f"{KINDS[kind]}, paper"] = {n: [factor] for n, factor in paper.items()}
        for by, speeds in found[kind].items():
            ratios = {n: [speed / found["mqa"][by][n]] for n, speed in speeds.items()}
            factors[f"{KINDS[kind]}, {by}"] = ratios
    return [
        Panel("cache of a sequence, 1.3B, computed", "tokens", "megabytes", caches, digits=1),
        Panel("roofline of a TPU-v3, 1.3B", "tokens", "factor over MQA", factors, digits=2),
    ]


@functools.cache
def cache_bytes(preset, length):
    return memory_sizes(preset, 1, length).cache


def computed_speeds(preset):
    """Returns `{kind of roofline: {tokens to generate: tokens/s}}`, at the largest batch size."""
    parameters = memory_sizes(preset, 1, 1).parameters
    found: dict = {by: {} for by in RATES}
    for tokens in PAPER["hawk"]:
        fit = int((TPU_V3_MEMORY - parameters) // cache_bytes(preset, tokens))
        rows = 1 << fit.bit_length() - 1
        places = tokens * (np.arange(PLACES) + 0.5) / PLACES
        for by, rates in RATES.items():
            times = [sum(decoding_time(preset, rows, int(place), **rates)) for place in places]
            found[by][tokens] = rows / np.mean(times)
    return found


# --- 2. Measurement ---


@functools.lru_cache(maxsize=1)
def build(kind, size):
    """Builds a model with random weights."""
    keras.utils.set_random_seed(0)
    window = {"sliding_window": size.window} if kind == "griffin" else {}
    model = make_model(f"{kind}_{size.preset}", size.dtype, **window)
    model.compile(sampler="greedy")
    return model


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
    and caches of twice the batch exceed the GPU's memory, or the framework raised an error.
    """

    def fits(batch):
        return GPU is None or memory_sizes(model, batch, bucket(tokens)).total < room()

    found, batch = [], first
    while fits(batch):
        try:
            _, seconds = (seconds_a_token(model, batch, tokens) for _ in range(2))  # compiles first
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


def rows_of_batch(model, key, size):
    """Returns the batch size and the reason why it is not larger."""
    if key["measure"] == "latency":
        return size.latency_rows, "given"
    if size.memory:
        return largest_batch(model, key["tokens"], size.memory), "memory as given"
    if "CPU" in machine():
        raise SystemExit("On a CPU, pass --memory, the bytes for weights and caches.")
    found, ended = doubled(model, key["tokens"], size.first_rows, size.longest_call)
    return max(found, key=lambda pair: pair[0] / pair[1])[0], ended


def key_of(size, kind, measure, prompt, tokens):
    case = {"measure": measure, "prompt": prompt, "tokens": tokens}
    return {**case, "model": kind, "preset": size.preset}


def runs(size, results):
    for kind in KINDS:
        for tokens in size.tokens:
            yield key_of(size, kind, "throughput", 0, tokens)
        for prompt in size.prompts:
            for tokens in size.latency_tokens:
                yield key_of(size, kind, "latency", prompt, tokens)


def measure(key, seeds, size, data):
    """Yields a time for each of the seeds."""
    on_cpu = "CPU" in machine()
    clock = time.process_time if on_cpu else time.perf_counter
    model = build(key["model"], size)
    gc.collect()  # frees the previous model
    rows, ended = rows_of_batch(model, key, size)
    walk = (model, rows, key["tokens"], key["prompt"])
    seconds_a_token(*walk)  # compiles
    least = None if on_cpu else 1000 * least_seconds_a_token(*walk, **device_rates(size.dtype))
    for _ in seeds:
        yield {
            "rows": rows,
            "ended_by": ended,
            "ms_a_step": round(1000 * seconds_a_token(*walk, clock=clock), 4),
            "roofline_ms": least and round(least, 4),
            "time": "of the CPUs" if on_cpu else "that passed",
        }


# --- 3. Results ---


def times(results, size, *case):
    """Returns the milliseconds per step of each repeat."""
    return np.array([line["ms_a_step"] for line in results.select(**key_of(size, *case))])


def speeds(results, size, kind, tokens):
    """Returns the tokens/s of each repeat."""
    lines = results.select(**key_of(size, kind, "throughput", 0, tokens))
    return np.array([1000 * line["rows"] / line["ms_a_step"] for line in lines])


def throughput(results, size):
    """Returns the panels of tokens/s, and of their factors over MQA."""
    found = {k: {n: speeds(results, size, k, n) for n in size.tokens} for k in KINDS}
    found = {k: {n: v for n, v in by_tokens.items() if len(v)} for k, by_tokens in found.items()}
    middle = {n: np.median(v) for n, v in found["mqa"].items()}
    ratios = {k: {n: v / middle[n] for n, v in f.items()} for k, f in found.items()}
    verdicts = {}
    for kind, other in itertools.pairwise(KINDS):
        above = [f"{n:,} {yes(clear(found[other][n], v))}" for n, v in found[kind].items()]
        medians = [np.median(v) for v in ratios[kind].values()]
        rises = yes(all(a < b for a, b in itertools.pairwise(medians)))
        verdicts[KINDS[kind]] = (
            f"above {KINDS[other]} by 2 deviations: {', '.join(above)}; rises with length: {rises}"
        )
    shown = {KINDS[kind]: ratios[kind] for kind in KINDS}
    absolute = {KINDS[kind]: found[kind] for kind in KINDS}
    return [
        Panel("throughput", "generated tokens", "factor over MQA", shown, verdicts, digits=2),
        Panel("throughput", "generated tokens", "tokens/s", absolute, digits=0),
    ]


def latency(results, size):
    curves, verdicts = {}, {}
    longest, prompt = max(size.latency_tokens), max(size.prompts)
    waits = functools.partial(times, results, size)
    for kind, name in KINDS.items():
        for before in size.prompts:
            found = {n: waits(kind, "latency", before, n) for n in size.latency_tokens}
            curves[f"{name}, after {before:,}"] = found
        if kind != "mqa":
            one, other = (waits(k, "latency", prompt, longest) for k in (kind, "mqa"))
            verdicts[f"{name}, after {prompt:,}"] = (
                f"below MQA by 2 deviations: {yes(clear(one, other))}"
            )
    title = f"batch size {size.latency_rows}"
    return Panel(title, "generated tokens", "ms per token", curves, verdicts)


def panels(results, size):
    return [*roofline(), *throughput(results, size), latency(results, size)]
