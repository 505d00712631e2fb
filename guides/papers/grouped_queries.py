"""Grouped queries: pooling of heads, length of uptraining, time per token.

    make paper-grouped_queries                # minutes; or, with the package installed:
    KERAS_BACKEND=jax python guides/papers/grouped_queries.py
    KERAS_BACKEND=jax python guides/papers/grouped_queries.py --full                # on a GPU

Ainslie et al. 2023 (arXiv:2305.13245), figures 4 to 6, pool the key and value heads of a T5 and
continue training for a fraction of its original steps. Mean pooling is better than the first head,
which is better than random heads; 5 % of the steps help, and beyond 10 % little is gained. With 64
heads, 1 to 8 groups take nearly the same time per token.

The byte-level model is that of guides/gqa_uptraining.py. Times are measured on a GPT-2 with random
weights and a full cache; on a CPU they are process time, because other programs may run. With
`--times`, nothing else is measured.
"""

import dataclasses
import functools
import math
import os
import pathlib
import sys
import time

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")
# The folders of the other guides and of benchmarks.
sys.path.extend(str(pathlib.Path(__file__).resolve().parents[i]) for i in (1, 2))

import gqa_uptraining as guide
import keras
import keras_hub
import matplotlib.figure
import numpy as np
from keras import ops
from quickstart import load_documents
from runs import (
    Results,
    command_line,
    deviations,
    draw_band,
    machine,
    picture,
    read_command_line,
    table,
    with_error,
)

from benchmarks.timing import compile_forward, seconds
from keras_recurrent.conversion import convert_to_gqa, uptraining

MULTI_HEAD, SHARE, LARGEST_SHARE = "all heads", 0.05, 0.1
COLORS = {"mean": "tab:blue", "first": "tab:orange", "random": "tab:green", MULTI_HEAD: "gray"}


@dataclasses.dataclass
class Size:
    """Sizes of training and timing. Lengths are tokens; the trained model's tokens are bytes."""

    width: int
    head_dim: int
    length: int
    steps: int  # before conversion
    groups: tuple
    regularized: tuple  # 1: with dropout and weight decay; 0: without
    rows: int  # held-out sequences
    heads: int  # this and the following fields: the timed model
    timed_width: int
    timed_layers: int
    timed_length: int  # in the cache
    batch: int
    repeats: int


MINIATURE = Size(64, 16, 64, 1500, (4, 1), (1,), 512, 64, 1024, 1, 2560, 2, 8)
FULL = Size(64, 32, 128, 6000, (4, 2, 1), (1, 0), 1024, 64, 4096, 4, 2560, 32, 20)


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


def learn(size, seed, regularized, documents, validation, results):
    """Trains the multi-head model of a seed, converts it, and uptrains all variants."""
    missing = [key for key in keys(size, regularized) if results.missing([seed], **key)]
    if not missing:
        return
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    dropout, decay = (guide.DROPOUT, guide.WEIGHT_DECAY) if regularized else (0.0, 0.0)
    model = guide.multi_head_model(size.width, 2, size.head_dim, size.length, dropout)
    guide.compile_for_training(model, guide.LEARNING_RATE, decay)
    rows = guide.rows_of(documents, size.steps * guide.BATCH_SIZE, rng, size.length)
    start = time.perf_counter()
    model.fit(*rows, batch_size=guide.BATCH_SIZE, verbose=0)
    seconds = round(time.perf_counter() - start, 1)
    more = guide.rows_of(documents, size.steps * guide.BATCH_SIZE, rng, size.length)
    for key in missing:
        # With a constant learning rate, one run passes through all proportions.
        plan = uptraining(size.steps, guide.LEARNING_RATE, LARGEST_SHARE)
        grouped = model
        if key["pooling"] != MULTI_HEAD:
            grouped = convert_to_gqa(model, key["groups"], pooling=key["pooling"], seed=seed)
        curve = guide.train_on(grouped, more, plan, validation, decay)
        results.append(
            **key,
            seed=seed,
            curve=[[step, round(bits, 4)] for step, bits in curve],
            bytes=size.steps * guide.BATCH_SIZE * size.length,
            seconds_of_first_training=seconds,
            machine=machine(),
        )
        print(
            f"{key['groups']} groups, {key['pooling']}, seed {seed}"
            f"{'' if regularized else ', not regularized'}: "
            f"{' '.join(f'{bits:.3f}' for _, bits in curve)} bits a byte",
            flush=True,
        )


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


def beyond(differences):
    """Returns True if the differences exceed 0 by two of their standard deviations."""
    return np.mean(differences) > 2 * deviations(differences)


# --- 2. Time by the number of groups ---


def times_key(size):
    return {
        "measure": "time",
        "heads": size.heads,
        "width": size.timed_width,
        "length": size.timed_length,
        "batch": size.batch,
    }


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


def seconds_by_groups(models, size, clock):
    """Returns `{groups: (median seconds, bytes of the cache)}`; models take turns."""
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


def measure_times(size, seeds, results):
    missing = results.missing(seeds, **times_key(size))
    if not missing:
        return
    keras.utils.set_random_seed(0)
    on_cpu = "CPU" in machine()
    clock = time.process_time if on_cpu else time.perf_counter
    model = timed_model(size)
    numbers = [size.heads >> i for i in range(size.heads.bit_length())]
    models = {groups: convert_to_gqa(model, groups) for groups in numbers}
    for seed in missing:
        for groups, (median, num_bytes) in seconds_by_groups(models, size, clock).items():
            results.append(
                **times_key(size),
                seed=seed,
                groups=groups,
                ms_a_token=round(1000 * median / size.batch, 4),
                bytes=num_bytes,
                time="of the CPUs" if on_cpu else "that passed",
                machine=machine(),
            )
            print(f"{groups} groups of {size.heads}: {results.lines[-1]['ms_a_token']} ms")


def times(results, size):
    """Returns `{groups: milliseconds [repeats]}` per token and sample."""
    lines = results.select(**times_key(size))
    return {
        groups: np.array([line["ms_a_token"] for line in lines if line["groups"] == groups])
        for groups in sorted({line["groups"] for line in lines})
    }


# --- 3. Results ---


def judge_learning(results, size, regularized):
    said = []
    for groups in size.groups:
        found = [bits(results, size, groups, name, regularized, SHARE) for name in guide.POOLINGS]
        for (worse, a), (better, b) in (
            (("first", found[1]), ("mean", found[0])),
            (("random", found[2]), ("first", found[1])),
        ):
            gap = a - b
            said.append(
                f"{groups} groups at {SHARE}: {better} below {worse} by {with_error(gap)}, "
                f"beyond 2 deviations: {'yes' if beyond(gap) else 'NO'}"
            )
        at = {
            share: bits(results, size, groups, "mean", regularized, share)
            for share in (0, SHARE, LARGEST_SHARE)
        }
        said.append(
            f"{groups} groups, mean: the first {SHARE} gain {with_error(at[0] - at[SHARE])}, "
            f"as many steps more {with_error(at[SHARE] - at[LARGEST_SHARE])}"
        )
    return said


def judge_times(found, heads):
    middle = [np.median(found[groups]) for groups in sorted(found)]
    said = [f"monotone in the groups: {'yes' if middle == sorted(middle) else 'NO'}"]
    if heads == 64:
        one, eight, all_heads = (np.median(found[groups]) for groups in (1, 8, 64))
        for text, ratio, holds in (
            (
                "8 groups take {:.2f} times the time of 1, at most 1.3",
                eight / one,
                1.3 * one >= eight,
            ),
            (
                "64 take {:.2f} times the time of 8, at least 2",
                all_heads / eight,
                all_heads >= 2 * eight,
            ),
        ):
            said.append(f"{text.format(ratio)}: {'yes' if holds else 'NO'}")
    return said


def tell(results, size):
    parts = []
    for regularized in size.regularized:
        rows, shares = [], (0, 0.025, SHARE, 0.075, LARGEST_SHARE)
        for key in keys(size, regularized):
            which = key["groups"], key["pooling"], regularized
            cells = (with_error(bits(results, size, *which, share)) for share in shares)
            rows.append((f"{key['groups']} groups, {key['pooling']}", *cells))
        kind = "with" if regularized else "without"
        columns = (f"bits a byte, {kind} dropout and weight decay, trained on for", *shares)
        said = (f"- {line}" for line in judge_learning(results, size, regularized))
        parts += [table(columns, rows), "\n".join(said)]
    return "\n\n".join(parts)


def tell_times(results, size):
    found = times(results, size)
    lines = {line["groups"]: line for line in results.select(**times_key(size))}
    rows = [
        (
            f"{groups} groups",
            with_error(ms),
            f"{np.median(ms) / np.median(found[1]):.2f}",
            f"{lines[groups]['bytes'] / 2**20:,.2f}",
        )
        for groups, ms in found.items()
    ]
    header = (f"of {size.heads} heads", "ms per token and sample", "times one group", "cache, MiB")
    said = (f"- {line}" for line in judge_times(found, size.heads))
    return "\n\n".join((table(header, rows), "\n".join(said)))


def draw(results, size, path):
    regularized = size.regularized[0]
    figure = matplotlib.figure.Figure(figsize=(4 * (len(size.groups) + 1), 4), layout="constrained")
    *panels, time_axes = figure.subplots(1, len(size.groups) + 1)
    for groups, axes in zip(size.groups, panels, strict=True):
        for pooling in (*guide.POOLINGS, MULTI_HEAD):
            of = guide.HEADS if pooling == MULTI_HEAD else groups
            shares, curves = bits(results, size, of, pooling, regularized)
            draw_band(axes, shares, curves.T, color=COLORS[pooling], marker="o", label=pooling)
        axes.set(
            xlabel="fraction of the original training steps",
            ylabel="bits per byte, held out",
            title=f"{groups} of {guide.HEADS} key and value heads",
        )
        axes.legend()
    found = times(results, size)
    draw_band(time_axes, list(found), found.values(), marker="o")
    time_axes.set_xscale("log", base=2)
    time_axes.set(
        xlabel=f"groups of {size.heads} heads",
        ylabel="ms per token and sample",
        title=f"{size.timed_length:,} tokens in the cache",
        ylim=(0, None),
    )
    figure.savefig(path, dpi=120)


# --- 4. Main program ---


def main():
    parser = command_line(__doc__, MINIATURE, FULL)
    parser.add_argument("--times", action="store_true", help="only times by the number of groups")
    parser.set_defaults(seeds=None)  # three, or five with --full
    arguments, size = read_command_line(parser, MINIATURE, FULL)
    seeds = arguments.seeds or list(range(5 if arguments.full else 3))
    results = Results(arguments.output / "grouped_queries.jsonl")
    measure_times(size, seeds, results)
    print(tell_times(results, size))
    if arguments.times:
        return
    training, held_out = load_documents(None)
    rng = np.random.default_rng(0)
    validation = guide.rows_of(held_out, size.rows, rng, size.length)
    for regularized in size.regularized:
        for seed in seeds:
            learn(size, seed, regularized, training, validation, results)
    draw(results, size, picture(arguments, "grouped_queries"))
    print(tell(results, size))


if __name__ == "__main__":
    main()
