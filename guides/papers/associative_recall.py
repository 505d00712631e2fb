"""HGRN2 recalls more than HGRN at the same width (HGRN2, section 4.1, figure 3).

    make paper-associative_recall             # minutes; or, with the package installed:
    KERAS_BACKEND=jax python guides/papers/associative_recall.py
    KERAS_BACKEND=jax python guides/papers/associative_recall.py --full     # on a GPU

Qin et al. 2024 (arXiv:2404.07904) plot the accuracy of HGRN and HGRN2 in multi-query associative
recall against the model's width, for several sequence lengths: HGRN2 is above HGRN in all of them.
They search learning rates and expansion ratios; here the best of a few counts. The models are
those of guides/associative_recall.py: two layers of HGRN2, or of HGRN with a norm and an output
projection, with the same projections and about the same number of parameters. HGRN's state has one
number per channel, HGRN2's `expansion`.

Models with the same seed train on the same sequences.
"""

import dataclasses
import os
import time

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import matplotlib.figure
import numpy as np
from runs import (
    Results,
    command_line,
    deviations,
    draw_band,
    guide_above,
    machine,
    percent,
    picture,
    read_command_line,
    table,
    yes,
)
from synthetic.associative_recall import associative_recall
from tasks import final_shares, learn
from training import adamw

models_of = guide_above("associative_recall")
MODELS = "HGRN", "HGRN2"
BOTH = 0.99  # if both models reach this accuracy, neither is better


@dataclasses.dataclass
class Size:
    """Sizes of a run. `lengths` and `pairs` have one value per task."""

    lengths: tuple  # tokens of a sequence
    pairs: tuple  # keys with a value in a sequence
    vocabulary: int
    widths: tuple
    expansions: tuple  # expansion ratios of HGRN2, if they divide the width
    rates: tuple[float, ...]  # learning rates; the best one counts
    rows: int  # batch size
    test_rows: int
    steps: int  # maximum; training ends earlier when all seeds reach `enough`
    every: int  # steps between tests
    enough: float


MINIATURE = Size((32,), (8,), 64, (32, 64), (32,), (5e-3, 1e-2), 32, 256, 350, 35, 0.995)
FULL = Size(
    *((256, 512), (16, 64), 1024, (64, 128, 256), (64, 128), (1e-3, 5e-3, 1e-2)),
    *(32, 512, 1200, 100, 0.995),
)


# --- 1. Training and testing ---


def settings(size):
    """Yields the keys of all results, without learning rate and seed."""
    for length, pairs in zip(size.lengths, size.pairs, strict=True):
        for width in size.widths:
            key = {"length": length, "pairs": pairs, "width": width, "most_steps": size.steps}
            yield {"model": "HGRN", "expansion": 1, **key}
            for expansion in size.expansions:
                if width % expansion == 0:
                    yield {"model": "HGRN2", "expansion": expansion, **key}


def run(key, size, members):
    """Trains a model for all rates and seeds in parallel and yields a line of results for each.

    members: pairs of a learning rate and a seed.
    """
    models, (rates, seeds) = [], zip(*members, strict=True)
    for seed in seeds:
        keras.utils.set_random_seed(seed)
        models.append(
            models_of.build(key["model"], size.vocabulary, key["width"], key["expansion"])
        )

    def rows(count, seed):
        return associative_recall(count, key["pairs"], key["length"], size.vocabulary, seed=seed)

    start = time.perf_counter()
    curves, losses = learn(
        models,
        seeds,
        lambda seed: rows(size.rows, seed),
        rows(size.test_rows, 0),
        size.steps,
        size.every,
        adamw(max(rates), size.steps // 10, size.steps, end=0.1),
        size.enough,
        logits=lambda model, tokens: model(tokens),
        factors=[rate / max(rates) for rate in rates],
    )
    seconds = time.perf_counter() - start
    for (rate, seed), model, curve, loss in zip(members, models, curves, losses, strict=True):
        yield {
            **key,
            "rate": rate,
            "seed": seed,
            "parameters": model.count_params(),
            "state_numbers": models_of.state_size(model),
            "rows_a_step": size.rows,
            "training_loss": round(loss, 4),
            "seconds_of_all_members": round(seconds, 1),
            "machine": machine(),
            "right_after": curve,
        }


# --- 2. Results ---


def best(results, size, name, **task):
    """Returns the lines, one per seed, of the rate and expansion with the highest final mean."""
    found = [
        results.select(**key, rate=rate)
        for key in settings(size)
        if key["model"] == name and all(key[k] == v for k, v in task.items())
        for rate in size.rates
    ]
    return max(filter(None, found), key=lambda lines: np.mean(final_shares(lines)))


def tasks(size):
    return [
        {"length": length, "pairs": pairs}
        for length, pairs in zip(size.lengths, size.pairs, strict=True)
    ]


def draw(results, size, path):
    figure = matplotlib.figure.Figure(figsize=(5 * len(size.lengths), 4), layout="constrained")
    (row,) = figure.subplots(1, len(size.lengths), sharey=True, squeeze=False)
    for axes, task in zip(row, tasks(size), strict=True):
        for name in MODELS:
            found = [final_shares(best(results, size, name, width=w, **task)) for w in size.widths]
            draw_band(axes, size.widths, [100 * shares for shares in found], marker="o", label=name)
        axes.axhline(
            100 / task["pairs"], color="gray", linestyle="--", label="one of the values seen"
        )
        title = f"{task['pairs']} pairs in sequences of {task['length']:,}"
        axes.set(xlabel="width", title=title, ylim=(0, 104))
        axes.set_xscale("log", base=2)
        axes.set_xticks(size.widths, [str(width) for width in size.widths])
    row[0].set_ylabel("values recalled, %")
    row[0].legend()
    figure.savefig(path, dpi=120)


def judge(hgrn, hgrn2):
    """Formats the verdict from the accuracies of all seeds."""
    if np.mean(hgrn) >= BOTH and np.mean(hgrn2) >= BOTH:
        return "yes: both at least 99 %"
    gap = np.mean(hgrn2) - np.mean(hgrn)
    clear = gap > 2 * np.hypot(deviations(hgrn), deviations(hgrn2))
    return f"{yes(clear)}: HGRN2 above by more than 2 deviations"


def tell(results, size):
    """Formats a Markdown table with a row per task and width, at each model's best setting."""
    rows = []
    for task in tasks(size):
        for width in size.widths:
            hgrn, hgrn2 = (best(results, size, name, width=width, **task) for name in MODELS)
            rows.append(
                (
                    f"{task['pairs']} pairs in {task['length']:,} tokens, width {width}",
                    *(percent(final_shares(lines)) for lines in (hgrn, hgrn2)),
                    *(f"{lines[0]['state_numbers']:,}" for lines in (hgrn, hgrn2)),
                    *(lines[0]["rate"] for lines in (hgrn, hgrn2)),
                    judge(final_shares(hgrn), final_shares(hgrn2)),
                )
            )
    header = ("recalled, %", *MODELS, *(f"state of {name}" for name in MODELS))
    return table((*header, *(f"rate of {name}" for name in MODELS), ""), rows)


# --- 3. Main program ---


def main():
    parser = command_line(__doc__, MINIATURE, FULL)
    arguments, size = read_command_line(parser, MINIATURE, FULL)
    results = Results(arguments.output / "associative_recall.jsonl")
    print(f"{models_of.LAYERS} layers, on {machine()}")
    for key in settings(size):
        missing = [
            (rate, seed)
            for rate in size.rates
            for seed in results.missing(arguments.seeds, **key, rate=rate)
        ]
        for line in run(key, size, missing) if missing else ():
            results.append(**line)
            steps, share = list(line["right_after"].items())[-1]
            print(
                f"{key['model']}, expansion {key['expansion']}, {key['pairs']} pairs in "
                f"{key['length']:,}, width {key['width']}, rate {line['rate']}, seed "
                f"{line['seed']}: {share:.1%} right after {steps} steps; "
                f"{line['seconds_of_all_members']} s",
                flush=True,
            )
    draw(results, size, picture(arguments, "associative_recall"))
    print(tell(results, size))


if __name__ == "__main__":
    main()
