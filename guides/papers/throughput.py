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

import keras
import numpy as np
from constant_speed import room
from runs import Panel, clear, clock, yes
from tasks import GRIFFINS

from benchmarks.decoding import PLACES, decoding_time, least_seconds_a_token, seconds_a_token
from benchmarks.models import make_model
from benchmarks.timing import device_rates, has_gpu
from keras_recurrent.generation.prompts import bucket
from keras_recurrent.models import memory_sizes
from keras_recurrent.models.memory import get_backbone

TPU_V3 = {"bytes_per_second": 900e9, "flops_per_second": 123e12}  # the paper's table 3
RATES = {"bytes and operations": TPU_V3, "bytes only": {**TPU_V3, "flops_per_second": 1e30}}
TPU_V3_MEMORY = 32e9
# Figure 1b: tokens/s relative to MQA, by the number of generated tokens.
PAPER = {
    "Hawk": {512: 2.5, 1024: 4.1, 2048: 7.3, 4096: 14.8},
    "Griffin": {512: 1.1, 1024: 1.8, 2048: 3.3, 4096: 6.6},
}
LENGTHS = [2**i for i in range(8, 18)]  # lengths whose caches are computed
SIZES = {  # lengths are tokens
    "preset": ("tiny", "1.3b"),  # suffix of the preset, after the model's name
    "dtype": ("float32", "bfloat16"),
    "window": (128, 1024),  # of Griffin's local attention
    "tokens": ((64, 256, 1024), (512, 1024, 2048, 4096)),  # from an empty prompt, largest batch
    "memory": (6 * 2**20, 0),  # bytes for weights and caches; 0: the device's memory
    "most_rows": (1024, 512),  # largest batch size
    "latency_rows": (16, 16),
    "latency_tokens": ((256, 1024), (512, 4096)),  # to generate after each of the prompts
    "prompts": ((0, 1024), (0, 4096)),
}


# --- 1. Roofline for the paper's sizes and device ---


def roofline():
    """Returns the panels of cache sizes, and of tokens/s relative to MQA."""
    backbones = {name: get_backbone(f"{name.lower()}_1.3b", "bfloat16") for name in GRIFFINS}
    speeds = {name: computed_speeds(backbone) for name, backbone in backbones.items()}
    factors: dict = {}
    for name, paper in PAPER.items():
        factors[f"{name}, paper"] = {n: [factor] for n, factor in paper.items()}
        for by, found in speeds[name].items():
            ratios = {n: [speed / speeds["MQA"][by][n]] for n, speed in found.items()}
            factors[f"{name}, {by}"] = ratios
    caches = {
        name: {n: [memory_sizes(backbone, 1, n).cache / 1e6] for n in LENGTHS}
        for name, backbone in backbones.items()
    }
    return [
        Panel("cache of a sequence, 1.3B, computed", "tokens", "megabytes", caches, digits=1),
        Panel("roofline of a TPU-v3, 1.3B", "tokens", "factor over MQA", factors, digits=2),
    ]


def computed_speeds(backbone):
    """Returns `{kind of roofline: {tokens to generate: tokens/s}}`, at the largest batch size."""
    found: dict = {by: {} for by in RATES}
    for tokens in PAPER["Hawk"]:
        rows = largest_batch(backbone, tokens, TPU_V3_MEMORY)
        places = tokens * (np.arange(PLACES) + 0.5) / PLACES
        for by, rates in RATES.items():
            times = [sum(decoding_time(backbone, rows, int(place), **rates)) for place in places]
            found[by][tokens] = rows / np.mean(times)
    return found


def largest_batch(model, tokens, memory):
    """Returns the largest power of two whose weights and caches fit into `memory` bytes."""
    sizes = memory_sizes(model, 1, tokens)
    fit = int((memory - sizes.parameters) // sizes.cache)
    if fit < 1:
        raise SystemExit(
            f"Weights of {sizes.parameters:,} bytes and a cache of {sizes.cache:,} for a single "
            f"sequence of {tokens:,} tokens exceed {memory:,.0f} bytes. Increase "
            "--memory, or reduce --tokens."
        )
    return 1 << fit.bit_length() - 1


# --- 2. Measurement ---


@functools.lru_cache(maxsize=1)
def build(kind, size):
    """Builds a model with random weights."""
    keras.utils.set_random_seed(0)
    window = {"sliding_window": size.window} if kind == "griffin" else {}
    model = make_model(f"{kind}_{size.preset}", size.dtype, **window)
    model.compile(sampler="greedy")
    return model


def runs(size, results):
    for name in GRIFFINS:
        cases = [("throughput", 0, tokens) for tokens in size.tokens]
        cases += itertools.product(["latency"], size.prompts, size.latency_tokens)
        for measured, prompt, tokens in cases:
            key = {"measure": measured, "prompt": prompt, "tokens": tokens}
            yield {**key, "model": name.lower(), "preset": size.preset}


def measure(key, seeds, size, data):
    """Yields a time for each of the seeds."""
    model, rows, tokens = build(key["model"], size), size.latency_rows, key["tokens"]
    gc.collect()  # frees the previous model
    if key["measure"] == "throughput":
        rows = largest_batch(model, bucket(tokens), size.memory or room())
        rows = min(rows, size.most_rows)
    now, description = clock()
    walk = (model, rows, tokens, key["prompt"])
    seconds_a_token(*walk)  # compiles
    least = None
    if has_gpu():
        least = round(1000 * least_seconds_a_token(*walk, **device_rates(size.dtype)), 4)
    for _ in seeds:
        milliseconds = round(1000 * seconds_a_token(*walk, clock=now), 4)
        times = {"ms_a_step": milliseconds, "roofline_ms": least, "time": description}
        yield {"rows": rows, **times}


def throughput(results, size):
    """Returns the panels of tokens/s, and of their factors over MQA."""
    keys = [key for key in runs(size, results) if key["measure"] == "throughput"]
    found = results.curves(
        keys, "model", "tokens", lambda line: 1000 * line["rows"] / line["ms_a_step"]
    )
    found = {name: found[name.lower()] for name in GRIFFINS}
    middle = {n: np.median(v) for n, v in found["MQA"].items()}
    factors = {k: {n: v / middle[n] for n, v in f.items()} for k, f in found.items()}
    verdicts = {}
    for name, other in itertools.pairwise(GRIFFINS):
        above = [f"{n:,} {yes(clear(found[other][n], v))}" for n, v in found[name].items()]
        medians = [np.median(v) for v in factors[name].values()]
        rises = yes(all(a < b for a, b in itertools.pairwise(medians)))
        verdicts[name] = (
            f"above {other} by 2 deviations: {', '.join(above)}; rises with length: {rises}"
        )
    return [
        Panel("throughput", "generated tokens", "factor over MQA", factors, verdicts, digits=2),
        Panel("throughput", "generated tokens", "tokens/s", found, digits=0),
    ]


def latency(results, size):
    keys = [key for key in runs(size, results) if key["measure"] == "latency"]
    curves, verdicts = {}, {}
    for name, prompt in itertools.product(GRIFFINS, size.prompts):
        same = [key for key in keys if (key["model"], key["prompt"]) == (name.lower(), prompt)]
        found = results.curves(same, "measure", "tokens", lambda line: line["ms_a_step"])
        curves[f"{name}, after {prompt:,}"] = found.get("latency", {})
    *others, mqa = (f"{name}, after {max(size.prompts):,}" for name in GRIFFINS)
    for label in others:
        one, other = (found[max(found)] for found in (curves[label], curves[mqa]))
        verdicts[label] = f"below MQA by 2 deviations: {yes(clear(one, other))}"
    title = f"batch size {size.latency_rows}"
    return Panel(title, "generated tokens", "ms per token", curves, verdicts)


def panels(results, size):
    return [*roofline(), *throughput(results, size), latency(results, size)]
