"""Grouped queries: pooling of heads, length of uptraining, time per token (GQA, figures 4 to 6).

The byte-level model is that of guides/gqa_uptraining.py. Times are measured on a GPT-2 with random
weights and a full cache; on a CPU they are process time, because other programs may run.
`--only time` measures nothing else.
"""

import functools
import itertools
import math

import gqa_uptraining as guide
import keras
import keras_hub
import numpy as np
from keras import ops
from quickstart import load_documents
from runs import Panel, clock, deviations, mean_with_error, yes

from benchmarks.timing import compile_forward, medians
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


def runs(size, results):
    timed = {"heads": size.heads, "width": size.timed_width, "length": size.timed_length}
    for i in range(size.heads.bit_length()):
        yield {"measure": "time", **timed, "batch": size.batch, "groups": size.heads >> i}
    for regularized in size.regularized:
        trained = {"regularized": regularized, "steps": size.steps, "width": size.width}
        cases = [*itertools.product(size.groups, guide.POOLINGS), (guide.HEADS, MULTI_HEAD)]
        # All heads are last, because uptraining changes the model that others are converted from.
        for groups, pooling in cases:
            yield {"measure": "uptraining", "groups": groups, "pooling": pooling, **trained}


def measure(key, seeds, size, data):
    if key["measure"] == "time":
        return [times_by_groups(seed, size)[key["groups"]] for seed in seeds]
    return [uptrain(key, seed, size) for seed in seeds]


# --- 1. Quality: pooling and proportion ---


@functools.cache
def train(size, seed, regularized):
    """Trains a multi-head model; returns it and further sequences."""
    dropout, decay = (guide.DROPOUT, guide.WEIGHT_DECAY) if regularized else (0.0, 0.0)
    documents, _ = load_documents(None)
    shape = size.width, 2, size.head_dim, size.length
    return guide.train_multi_head(seed, documents, size.steps, *shape, dropout, decay)


def uptrain(key, seed, size):
    """Converts the multi-head model of a seed, and uptrains it."""
    model, rows = train(size, seed, key["regularized"])
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
    }


# --- 2. Time by the number of groups ---


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
def times_by_groups(seed, size):
    """Returns `{groups: results}` of medians; models take turns."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=256,
        num_layers=size.timed_layers,
        num_heads=size.heads,
        hidden_dim=size.timed_width,
        intermediate_dim=size.timed_width,
        max_sequence_length=size.timed_length,
    )
    model = keras_hub.models.GPT2CausalLM(backbone)
    all_groups = [size.heads >> i for i in range(size.heads.bit_length())]
    prepared = {n: prepare_step(convert_to_gqa(model, n), size) for n in all_groups}
    caches = {groups: cache for groups, (cache, _) in prepared.items()}
    now, description = clock()

    def run(groups):
        logits, caches[groups] = prepared[groups][1](caches[groups])
        ops.convert_to_numpy(logits)

    calls = {groups: functools.partial(run, groups) for groups in all_groups}
    times = medians(calls, least=size.repeats, most=size.repeats, clock=now)
    sizes = {groups: 4 * math.prod(cache.shape) for groups, cache in caches.items()}  # float32
    whole = sizes[size.heads]
    assert all(num * size.heads == whole * groups for groups, num in sizes.items()), sizes
    milliseconds = {n: round(1000 * median / size.batch, 4) for n, median in times.items()}
    return {
        n: {"ms_a_token": milliseconds[n], "bytes": sizes[n], "time": description} for n in times
    }


def learning(results, keys, groups, size):
    """Returns the panel of bits per byte during uptraining."""
    curves = {}
    for key in keys:
        lines = results.select(**key)
        values = np.transpose([[bits for _, bits in line["curve"]] for line in lines])
        shares = [round(step / size.steps, 3) for step, _ in lines[0]["curve"]]
        curves[key["pooling"]] = dict(zip(shares, values, strict=True))

    def bits(pooling, share):
        return min(curves[pooling].items(), key=lambda pair: abs(pair[0] - share))[1]

    start, middle, end = (bits("mean", share) for share in (0, SHARE, LARGEST_SHARE))
    gains = mean_with_error(start - middle), mean_with_error(middle - end)
    verdicts = {"mean": f"the first {SHARE} gain {gains[0]}, as many steps more {gains[1]}"}
    for worse, better in (("first", "mean"), ("random", "first")):
        gap = bits(worse, SHARE) - bits(better, SHARE)
        holds = yes(np.mean(gap) > 2 * deviations(gap))
        verdicts[worse] = f"above {better} at {SHARE} by {mean_with_error(gap)}: {holds}"
    title = f"{groups} groups{', regularized' if keys[0]['regularized'] else ''}"
    xlabel, ylabel = "fraction of the original steps", "bits per byte"
    return Panel(title, xlabel, ylabel, curves, verdicts, scale="linear")


def timing(results, keys, size):
    """Returns the panel of times by the number of groups."""
    found = results.curves(keys, "measure", "groups", lambda line: line["ms_a_token"])["time"]
    middle = {n: np.median(ms) for n, ms in found.items()}
    caches = ", ".join(f"{results.select(**key)[0]['bytes'] / 2**20:,.2f}" for key in keys)
    said = f"rises: {yes(sorted(middle.values()) == list(middle.values()))}; cache {caches} MiB"
    if size.heads == 64:
        first, last = middle[8] / middle[1], middle[64] / middle[8]
        said += f"; 8 groups take {first:.2f} times as long as 1, at most 1.3: {yes(first <= 1.3)}"
        said += f"; 64 take {last:.2f} times as long as 8, at least 2: {yes(last >= 2)}"
    label, labels = f"{size.heads} heads", ("time", "groups", "ms per token and sample")
    return Panel(*labels, {label: found}, {label: said})


def panels(results, size):
    keys = list(runs(size, results))
    timed = [key for key in reversed(keys) if key["measure"] == "time"]
    found = []
    for flag, groups in itertools.product(size.regularized, size.groups):
        chosen = [k for k in keys if k["measure"] == "uptraining" and k["regularized"] == flag]
        chosen = [k for k in chosen if k["groups"] == groups or k["pooling"] == MULTI_HEAD]
        found.append(learning(results, chosen, groups, size))
    return [*found, timing(results, timed, size)]
