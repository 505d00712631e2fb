"""Copying and induction by Hawk, Griffin and a Transformer (Griffin, figures 6a and 6b).

    make paper-synthetic_tasks                # minutes; or, with the package installed:
    KERAS_BACKEND=jax python guides/papers/synthetic_tasks.py
    KERAS_BACKEND=jax python guides/papers/synthetic_tasks.py --full     # on a GPU

De et al. 2024 (arXiv:2402.19427, section 6) train networks of 5 blocks and width 64 on two tasks.
In selective copying, data tokens among noise must be repeated in order: all models learn it, Hawk
clearly more slowly, Griffin with one layer of local attention about as fast as the Transformer with
multi-query attention (MQA). In the induction heads task, a sequence ends with a special token that
occurred before, and the token that followed it is the answer: all models learn it, and only MQA
fails beyond its training length.

Models with the same seed train on the same sequences.
"""

import dataclasses
import os
import time

# Keras reads this once, at import. "torch" and "tensorflow" also work.
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
from synthetic.induction_heads import induction_heads
from synthetic.selective_copying import selective_copying
from tasks import final_shares, griffin, learn, right
from training import adamw, predictor

TASKS = "copying", "induction"
MODELS = "Hawk", "Griffin", "MQA"
VOCABULARY = 16
LEARNED = 0.99  # final accuracy of a model that learned the task
QUICK = 0.9  # accuracy to which steps are counted


@dataclasses.dataclass
class Size:
    """Sizes of a run; lengths are tokens."""

    width: int
    num_layers: int
    rows: int  # batch size
    test_rows: int
    copying_length: int
    copying_data: int
    copying_window: int
    copying_steps: int  # maximum: training ends when all seeds reach `enough`
    induction_length: int
    induction_window: int
    induction_steps: int  # all are run, because longer sequences are learned late
    longest: int  # longest sequence in the induction test
    every: int  # steps between tests
    warmup: int  # steps of learning rate warmup
    learning_rate: float  # its maximum
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
    """Returns a function of a number of sequences, a seed and optionally a length."""
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
    """Trains the seeds of a model on a task in parallel and yields a line of results for each."""
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


# --- 2. Results ---


def lines_of(results, size, task, name):
    length = getattr(size, f"{task}_length")
    return results.select(task=task, model=name, width=size.width, length=length)


def models_of(results, size, task):
    """Returns the models that have results so far."""
    return [name for name in MODELS if lines_of(results, size, task, name)]


def steps_to(curve, share):
    """Returns the first step at which a curve `{steps: share}` reaches a share, or None."""
    return next((int(step) for step, found in curve.items() if found >= share), None)


def curves_of(lines, steps):
    """Returns curves `[seeds, steps]`; a curve that ended early keeps its last value."""
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
    left.set(xlabel="steps", ylabel="correct, %", title="selective copying")
    right_side.axvline(size.induction_length, color="gray", linestyle="--", linewidth=1)
    right_side.set(
        xlabel="sequence length",
        title=f"induction heads, trained on {size.induction_length:,} tokens",
    )
    right_side.set_xscale("log", base=2)
    right_side.set_xticks(lengths, [f"{n:,}" for n in lengths])
    for axes, task in ((left, "copying"), (right_side, "induction")):
        if models_of(results, size, task):
            axes.legend()
    figure.savefig(path, dpi=120)


def compare_speed(name, quick, transformer, most):
    """Compares the steps to 90 % with the Transformer's and formats the paper's claim.

    A seed that does not reach 90 % has None; it counts as the maximum number of steps, and the
    text says so. Without results of the Transformer there is no comparison.
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


# Claims about the longest sequences.
CLAIMS = {
    "Hawk": ("at least 95 %", lambda share: share >= 0.95),
    "Griffin": ("at least 90 %", lambda share: share >= 0.90),
    "MQA": ("at most 50 %", lambda share: share <= 0.50),
}


def learned(shares):
    return f"{yes(np.mean(shares) >= LEARNED)}: at least 99 % right"


def judge_reading_on(name, trained, longest):
    """Formats the verdicts for the training length and for the longest sequences."""
    claim, holds = CLAIMS[name]
    return f"{learned(trained)}; {yes(holds(np.mean(longest)))}: {claim} of the longest"


def tell(results, size):
    """Formats a Markdown table for each task."""
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
        shares = final_shares(lines_of(results, size, "copying", name))
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


# --- 3. Main program ---


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
