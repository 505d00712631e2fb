"""Grouped queries: pooling of heads, length of uptraining, time per token (GQA, figures 4 to 6).

The byte-level model is that of guides/gqa_uptraining.py. Times are measured on a GPT-2 with random
weights and a full cache; on a CPU they are process time, because other programs may run.
`--only time` measures nothing else.
"""

import functools
import math
import time

import gqa_uptraining as guide
import keras
import keras_hub
import numpy as np
from keras import ops
from quickstart import load_documents
from runs import Panel, beyond, machine, mean_with_error, yes

from benchmarks.timing import compile_forward, seconds
from keras_recurrent.conversion import convert_to_gqa, uptraining

SEEDS = 3, 5
MULTI_HEAD, SHARE, LARGEST_SHARE = "all heads", 0.05, 0.1
SIZES = {  # lengths are tokens; the trained model's tokens are bytes
    "width": (64, 64),
    "head_dim": (16, 32),
    "length": (64, 128),
    "steps": (1500, 6000),  # before conversion
    "groups": ((4, 1), (4, 2, 1)),
    "regularized": ((1,), (1, 0)),  # 1: with dropout and weight decay; 0: without
    "rows": (512, 1024),  # held-out sequences
    "heads": (64, 64),  # this and the following ones: the timed model
    "timed_width": (1024, 4096),
    "timed_layers": (1, 4),
    "timed_length": (2560, 2560),  # in the cache
    "batch": (2, 32),
    "repeats": (8, 20),
}


# --- 1. Quality: pooling and proportion ---


def key_of(size, groups, pooling, regularized):
    return {
        "measure": "uptraining",
        "groups": groups,
        "pooling": pooling,
        "regularized": regularized,
        "steps": size.steps,
        "width": size.width,
    }


def keys(size, regularized):
    for groups in size.groups:
        for pooling in guide.POOLINGS:
            yield key_of(size, groups, pooling, regularized)
    # Last, because uptraining changes the model that all others are converted from.
    yield key_of(size, guide.HEADS, MULTI_HEAD, regularized)


@functools.cache
def trained(size, seed, regularized):
    """Trains a multi-head model; returns it, further sequences, and the seconds."""
    documents, _ = load_documents(None)
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    dropout, decay = (guide.DROPOUT, guide.WEIGHT_DECAY) if regularized else (0.0, 0.0)
    model = guide.multi_head_model(size.width, 2, size.head_dim, size.length, dropout)
    guide.compile_for_training(model, guide.LEARNING_RATE, decay)
    rows = guide.rows_of(documents, size.steps * guide.BATCH_SIZE, rng, size.length)
    start = time.perf_counter()
    model.fit(*rows, batch_size=guide.BATCH_SIZE, verbose=0)
    passed = round(time.perf_counter() - start, 1)
    return model, guide.rows_of(documents, len(rows[0]), rng, size.length), passed


def uptrain(key, seed, size):
    """Converts the multi-head model of a seed, and uptrains it."""
    model, rows, passed = trained(size, seed, key["regularized"])
    _, held_out = load_documents(None)
    validation = guide.rows_of(held_out, size.rows, np.random.default_rng(0), size.length)
    # With a constant learning rate, one run passes through all proportions.
    plan = uptraining(size.steps, guide.LEARNING_RATE, LARGEST_SHARE)
    if key["pooling"] != MULTI_HEAD:
        model = convert_to_gqa(model, key["groups"], pooling=key["pooling"], seed=seed)
    decay = guide.WEIGHT_DECAY if key["regularized"] else 0.0
    curve = guide.train_on(model, rows, plan, validation, decay)
    return {
        "curve": [[step, round(bits, 4)] for step, bits in curve],
        "bytes": size.steps * guide.BATCH_SIZE * size.length,
        "seconds_of_first_training": passed,
    }


def bits(results, size, groups, pooling, regularized, share=None):
    """Returns bits per byte `[seeds]` nearest to a share of the steps.

    Without `share`, returns all shares and the curves `[seeds, points]`.
    """
    lines = results.select(**key_of(size, groups, pooling, regularized))
    curves = np.array([[bits for _, bits in line["curve"]] for line in lines])
    steps = np.array([step for step, _ in lines[0]["curve"]])
    if share is None:
        return steps / size.steps, curves
    return curves[:, np.argmin(abs(steps - share * size.steps))]


# --- 2. Time by the number of groups ---


def times_key(size, groups):
    return {
        "measure": "time",
        "heads": size.heads,
        "width": size.timed_width,
        "length": size.timed_length,
        "batch": size.batch,
        "groups": groups,
    }


def all_groups(size):
    return [size.heads >> i for i in range(size.heads.bit_length())]


def timed_model(size):
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=256,
        num_layers=size.timed_layers,
        num_heads=size.heads,
        hidden_dim=size.timed_width,
        intermediate_dim=size.timed_width,
        max_sequence_length=size.timed_length,
    )
    return keras_hub.models.GPT2CausalLM(backbone)


def prepare_step(model, size):
    """Returns the cache of a model, and a function of it: logits and cache of the last token."""
    # A cache of the model's layout and this length; zeros, as values change no timing.
    _, cache = model._build_cache(ops.zeros((size.batch, 2), "int32"))
    cache = ops.zeros((*cache.shape[:3], size.timed_length, *cache.shape[4:]), cache.dtype)
    token, index = ops.zeros((size.batch, 1), "int32"), size.timed_length - 1

    def step(cache, token, index):
        logits, _, cache = model.call_with_cache(token, cache, index)
        return logits, cache

    step = compile_forward(step, model, donate=[0])
    return cache, functools.partial(step, token=token, index=ops.convert_to_tensor(index))


@functools.cache
def seconds_by_groups(seed, size, clock):
    """Returns `{groups: (median seconds, bytes of the cache)}`; models take turns."""
    keras.utils.set_random_seed(0)
    model = timed_model(size)
    models = {groups: convert_to_gqa(model, groups) for groups in all_groups(size)}
    caches, steps = {}, {}
    for groups, model in models.items():
        caches[groups], steps[groups] = prepare_step(model, size)
    times: dict = {groups: [] for groups in models}

    def run(groups):
        logits, caches[groups] = steps[groups](caches[groups])
        ops.convert_to_numpy(logits)

    for _ in range(size.repeats + 2):  # the first two compile and warm up
        for groups, found in times.items():
            found.append(seconds(functools.partial(run, groups), clock=clock))
    sizes = {groups: 4 * math.prod(cache.shape) for groups, cache in caches.items()}  # float32
    whole = sizes[size.heads]
    assert all(num * size.heads == whole * groups for groups, num in sizes.items()), sizes
    return {groups: (np.median(found[2:]), sizes[groups]) for groups, found in times.items()}


def time_groups(key, seed, size):
    on_cpu = "CPU" in machine()
    clock = time.process_time if on_cpu else time.perf_counter
    median, num_bytes = seconds_by_groups(seed, size, clock)[key["groups"]]
    return {
        "ms_a_token": round(1000 * median / size.batch, 4),
        "bytes": num_bytes,
        "time": "of the CPUs" if on_cpu else "that passed",
    }


# --- 3. Results ---


def runs(size, results):
    for groups in all_groups(size):
        yield times_key(size, groups)
    for regularized in size.regularized:
        yield from keys(size, regularized)


def measure(key, seeds, size, data):
    step = time_groups if key["measure"] == "time" else uptrain
    return [step(key, seed, size) for seed in seeds]


def learning(results, size, groups, regularized):
    """Returns the panel of bits per byte during uptraining."""
    curves, at = {}, {}
    for pooling in (*guide.POOLINGS, MULTI_HEAD):
        count = guide.HEADS if pooling == MULTI_HEAD else groups
        shares, found = bits(results, size, count, pooling, regularized)
        curves[pooling] = dict(zip(shares.round(3).tolist(), found.T, strict=True))
        at[pooling] = functools.partial(bits, results, size, count, pooling, regularized)
    start, middle, end = (at["mean"](share) for share in (0, SHARE, LARGEST_SHARE))
    gains = mean_with_error(start - middle), mean_with_error(middle - end)
    verdicts = {"mean": f"the first {SHARE} gain {gains[0]}, as many steps more {gains[1]}"}
    for worse, better in (("first", "mean"), ("random", "first")):
        gap = at[worse](SHARE) - at[better](SHARE)
        verdicts[worse] = f"above {better} at {SHARE} by {mean_with_error(gap)}: {yes(beyond(gap))}"
    title = f"{groups} groups{', regularized' if regularized else ''}"
    xlabel, ylabel = "fraction of the original steps", "bits per byte"
    return Panel(title, xlabel, ylabel, curves, verdicts, logarithmic=False)


def timing(results, size):
    """Returns the panel of times by the number of groups."""
    lines = {n: results.select(**times_key(size, n)) for n in reversed(all_groups(size))}
    found = {n: np.array([line["ms_a_token"] for line in f]) for n, f in lines.items()}
    middle = {n: np.median(ms) for n, ms in found.items()}
    caches = ", ".join(f"{f[0]['bytes'] / 2**20:,.2f}" for f in lines.values())
    said = f"rises: {yes(sorted(middle.values()) == list(middle.values()))}; cache {caches} MiB"
    if size.heads == 64:
        first, last = middle[8] / middle[1], middle[64] / middle[8]
        said += f"; 8 groups take {first:.2f} times as long as 1, at most 1.3: {yes(first <= 1.3)}"
        said += f"; 64 take {last:.2f} times as long as 8, at least 2: {yes(last >= 2)}"
    label, labels = f"{size.heads} heads", ("time", "groups", "ms per token and sample")
    return Panel(*labels, {label: found}, {label: said})


def panels(results, size):
    settings = [(groups, flag) for flag in size.regularized for groups in size.groups]
    return [*(learning(results, size, *setting) for setting in settings), timing(results, size)]
