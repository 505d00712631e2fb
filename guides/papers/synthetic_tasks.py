"""Hawk, Griffin and a Transformer copy and look up (Griffin, section 6, figures 6a and 6b).

    make paper-synthetic_tasks                # minutes; or, where the package is installed:
    KERAS_BACKEND=jax python guides/papers/synthetic_tasks.py
    KERAS_BACKEND=jax python guides/papers/synthetic_tasks.py --full     # on a GPU

De et al. 2024 (arXiv:2402.19427) train networks of 5 blocks and width 64 on two tasks. In selective
copying, a row has data among noise, to be repeated in its order: all models learn it, Hawk clearly
more slowly, Griffin with its one layer of local attention about as fast as the Transformer with
multi-query attention (MQA). In the task of induction heads, a row ends in a special token that
stood somewhere before, and what came after it is to be said: all models learn that, and only MQA
fails at rows longer than those that it was trained on.

Models of one seed share their rows.
"""

import dataclasses
import os
import time

# Keras reads this once, when it is imported. "torch" and "tensorflow" do as well.
os.environ.setdefault("KERAS_BACKEND", "jax")

import matplotlib.figure
import numpy as np
from runs import (
    Results,
    command_line,
    deviations,
    draw_band,
    machine,
    octaves,
    percent,
    picture,
    read_command_line,
    table,
    with_error,
    yes,
)
from tasks import at_the_end, griffin, learn, right
from training import adamw, predictor

from keras_recurrent.datasets import induction_heads, selective_copying

TASKS = "copying", "induction"
MODELS = "Hawk", "Griffin", "MQA"
VOCABULARY = 16
LEARNED = 0.99  # of the answers are right at the end of training
QUICK = 0.9  # and this share is what the steps are counted to


@dataclasses.dataclass
class Size:
    """What a run is made of; lengths are tokens."""

    width: int
    num_layers: int
    rows: int  # of a step
    test_rows: int
    copying_length: int
    copying_data: int
    copying_window: int
    copying_steps: int  # at most: training ends where all seeds have `enough` right
    induction_length: int
    induction_window: int
    induction_steps: int  # to the last: rows longer than those of training are learned late
    longest: int  # to test induction on
    every: int  # steps from one test to the next
    warmup: int  # steps in which the rate of learning rises
    learning_rate: float  # at its highest
    enough: float


MINIATURE = Size(
    *(64, 5, 24, 256),
    *(16, 3, 8, 500),
    *(16, 8, 400, 128),
    *(20, 50, 2e-3, 0.995),
)
FULL = Size(
    *(64, 5, 32, 512),
    *(1024, 16, 512, 5000),
    *(256, 128, 8000, 8192),
    *(250, 500, 2e-3, 0.995),
)


# --- 1. Training and testing ---


def rows_of_task(task, size):
    """A function of how many rows, their seed and optionally their length."""
    if task == "copying":
        return lambda count, seed: selective_copying(
            count,
            num_data=size.copying_data,
            sequence_length=size.copying_length,
            vocabulary_size=VOCABULARY,
            seed=seed,
        )
    return lambda count, seed, length=size.induction_length: induction_heads(
        count, sequence_length=length, vocabulary_size=VOCABULARY, seed=seed
    )


def run(task, name, size, seeds):
    """Trains the seeds of a model on a task side by side, and gives a line of results for each."""
    length, window, steps = (
        getattr(size, f"{task}_{what}") for what in ("length", "window", "steps")
    )
    rows = rows_of_task(task, size)
    models = [griffin(name, size.num_layers, size.width, window, VOCABULARY, s) for s in seeds]
    start = time.perf_counter()
    curves, losses = learn(
        models,
        seeds,
        lambda seed: rows(size.rows, seed),
        rows(size.test_rows, 0),
        steps,
        size.every,
        adamw(size.learning_rate, size.warmup, steps, end=0.1),
        size.enough if task == "copying" else None,
    )
    seconds = time.perf_counter() - start
    longer = [{} for _ in seeds]
    for tested in octaves(length // 2, size.longest) if task == "induction" else ():
        tokens, *answers = rows(size.test_rows, 1, tested)
        predict = predictor(models[0], batch_size=max(1, 2**17 // tested))
        for found, model in zip(longer, models, strict=True):
            found[str(tested)] = round(right(predict(model, tokens), *answers), 4)
    for seed, model, curve, loss, found in zip(seeds, models, curves, losses, longer, strict=True):
        line = {
            "task": task,
            "model": name,
            "seed": seed,
            "width": size.width,
            "length": length,
            "window": window if name == "Griffin" else None,
            "parameters": model.count_params(),
            "rows_a_step": size.rows,
            "most_steps": steps,
            "training_loss": round(loss, 4),
            "seconds_of_all_seeds": round(seconds, 1),
            "machine": machine(),
            "right_after": curve,
        }
        yield {**line, "right_at": found} if found else line


# --- 2. What came out ---


def lines_of(results, size, task, name):
    length = getattr(size, f"{task}_length")
    return results.of(task=task, model=name, width=size.width, length=length)


def models_of(results, size, task):
    """The models that have lines; a later sitting may bring the missing ones."""
    return [name for name in MODELS if lines_of(results, size, task, name)]


def steps_to(curve, share):
    """The first steps after which a curve `{steps: share}` is as high; None if it never is."""
    return next((int(step) for step, found in curve.items() if found >= share), None)


def curves_of(lines, steps):
    """`[seeds, steps]`; a curve that was ended goes on as it was."""
    found = []
    for line in lines:
        last = 0.0
        found.append([last := line["right_after"].get(str(step), last) for step in steps])
    return np.array(found)


def draw(results, size, path):
    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
    left, right_side = figure.subplots(1, 2)
    steps = range(size.every, size.copying_steps + 1, size.every)
    lengths = octaves(size.induction_length // 2, size.longest)
    for name in models_of(results, size, "copying"):
        lines = lines_of(results, size, "copying", name)
        draw_band(left, steps, 100 * curves_of(lines, steps).T, label=name)
    for name in models_of(results, size, "induction"):
        lines = lines_of(results, size, "induction", name)
        curves = [[100 * line["right_at"][str(n)] for n in lengths] for line in lines]
        draw_band(right_side, lengths, np.transpose(curves), label=name)
    left.set(xlabel="steps", ylabel="right, %", title="selective copying")
    right_side.axvline(size.induction_length, color="gray", linestyle="--", linewidth=1)
    right_side.set(
        xlabel="tokens of a row",
        title=f"induction heads, trained on rows of {size.induction_length:,}",
    )
    right_side.set_xscale("log", base=2)
    right_side.set_xticks(lengths, [f"{n:,}" for n in lengths])
    for axes, task in ((left, "copying"), (right_side, "induction")):
        if models_of(results, size, task):
            axes.legend()
    figure.savefig(path, dpi=120)


def compare_speed(name, quick, transformer, most):
    """Steps to 90 % beside those of the Transformer, and whether it is as the paper has it.

    A seed that does not get there, None, counts as the most steps there were, and is told. Without
    steps of the Transformer, there are no others to stand beside.
    """
    late, counted = None in quick, np.array([n or most for n in quick])
    steps = with_error(counted, 0)
    if late:
        steps += f" at least: {quick.count(None)} of {len(quick)} not within {most:,}"
    if name == "MQA":
        return steps, "1", ""
    if transformer is None:
        return steps, "", "MQA was not run"
    late_transformer, others = None in transformer, np.array([n or most for n in transformer])
    sign = {(False, False): "", (True, False): "≥ ", (False, True): "≤ "}.get(
        (late, late_transformer)
    )
    ratio = "-" if sign is None else sign + with_error(counted / others, 2)
    gap = np.mean(counted) - np.mean(others)
    beyond = 2 * np.hypot(deviations(counted), deviations(others))
    if name == "Hawk":
        holds = gap > beyond and not late_transformer
        return steps, ratio, f"{yes(holds)}: slower than MQA by more than 2 deviations"
    holds = gap <= np.fmax(beyond, 0.25 * np.mean(others)) and not late
    return steps, ratio, f"{yes(holds)}: within 2 deviations of MQA, or a quarter, or faster"


# What is claimed at the longest rows.
CLAIMS = {
    "Hawk": ("at least 95 %", lambda share: share >= 0.95),
    "Griffin": ("at least 90 %", lambda share: share >= 0.90),
    "MQA": ("at most 50 %", lambda share: share <= 0.50),
}


def learned(shares):
    return f"{yes(np.mean(shares) >= LEARNED)}: at least 99 % right"


def judge_reading_on(name, trained, longest):
    """A verdict in words: of rows of the training length, and of the longest."""
    claim, holds = CLAIMS[name]
    return f"{learned(trained)}; {yes(holds(np.mean(longest)))}: {claim} of the longest"


def tell(results, size):
    """A table in Markdown for each of the tasks."""
    tables = {"copying": tell_copying, "induction": tell_induction}
    found = ((task, models_of(results, size, task)) for task in TASKS)
    return "\n\n".join(tables[task](results, size, names) for task, names in found if names)


def tell_copying(results, size, names):
    quick = {
        name: [steps_to(line["right_after"], QUICK) for line in lines]
        for name in names
        for lines in [lines_of(results, size, "copying", name)]
    }
    rows = []
    for name in names:
        shares = at_the_end(lines_of(results, size, "copying", name))
        transformer = quick.get("MQA")
        steps, ratio, verdict = compare_speed(name, quick[name], transformer, size.copying_steps)
        judged = "; ".join(filter(None, (learned(shares), verdict)))
        rows.append((name, percent(shares), steps, ratio, judged))
    header = (f"copying, rows of {size.copying_length:,}", "right at the end, %")
    return table((*header, "steps to 90 %", "of MQA's", ""), rows)


def tell_induction(results, size, names):
    lengths = octaves(size.induction_length // 2, size.longest)
    rows = []
    for name in names:
        lines = lines_of(results, size, "induction", name)
        found = {n: [line["right_at"][str(n)] for line in lines] for n in lengths}
        verdict = judge_reading_on(name, found[size.induction_length], found[lengths[-1]])
        rows.append((name, *(percent(found[n]) for n in lengths), verdict))
    header = (
        f"induction, rows of {size.induction_length:,}: right at, %",
        *(f"{n:,}" for n in lengths),
        "",
    )
    return table(header, rows)


# --- 3. All of it, in order ---


def main():
    parser = command_line(__doc__, MINIATURE, FULL)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    arguments, size = read_command_line(parser, MINIATURE, FULL)
    results = Results(arguments.output / "synthetic_tasks.jsonl")
    print(f"{size.num_layers} blocks of width {size.width}, on {machine()}")
    for task in arguments.tasks:
        length = getattr(size, f"{task}_length")
        for name in MODELS:
            key = {"task": task, "model": name, "width": size.width, "length": length}
            seeds = results.missing(arguments.seeds, **key)
            for line in run(task, name, size, seeds) if seeds else ():
                results.append(**line)
                steps, share = list(line["right_after"].items())[-1]
                print(
                    f"{task}, {name}, seed {line['seed']}: {share:.1%} right after {steps} steps; "
                    f"{line['seconds_of_all_seeds']} s",
                    flush=True,
                )
    draw(results, size, picture(arguments, "synthetic_tasks"))
    print(tell(results, size))


if __name__ == "__main__":
    main()
