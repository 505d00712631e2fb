"""Griffin looks up what its attention window holds (Griffin, section 6.2, figure 6c).

    make paper-phone_book                     # minutes; or, with the package installed:
    KERAS_BACKEND=jax python guides/papers/phone_book.py
    KERAS_BACKEND=jax python guides/papers/phone_book.py --full     # on a GPU

De et al. 2024 (arXiv:2402.19427) give models with six and seven billion weights, trained on text, a
phone book and ask for a number in it. The Transformer with multi-query attention (MQA) finds it in
books up to its training length. Griffin finds it in books up to its attention window, 1,024 tokens,
and less often in longer ones; Hawk only in very short ones.

Here small models are trained from scratch on books of each length. A number counts if all of its
digits are right. Griffin has one layer of local attention, in the middle. Models with the same seed
train on the same sequences.
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
    draw_band,
    machine,
    percent,
    picture,
    read_command_line,
    table,
    yes,
)
from synthetic.phone_book import phone_book
from tasks import final_shares, griffin, learn
from training import adamw

MODELS = "Hawk", "Griffin", "MQA"


@dataclasses.dataclass
class Size:
    """Sizes of a run."""

    width: int
    num_layers: int
    window: int  # attention window of Griffin, in tokens
    names: tuple  # in a book, in increasing order
    queries: int
    name_length: int
    number_length: int
    vocabulary: int
    tokens: int  # per step, approximately
    test_rows: int
    steps: int  # maximum; training ends earlier when all seeds reach `enough`
    every: int  # steps between tests
    warmup: int  # steps of learning rate warmup
    learning_rate: float
    enough: float

    @property
    def line(self):
        """Number of tokens of a name and its number, with their start token."""
        return 1 + self.name_length + self.number_length

    def row(self, names):
        """Returns the number of tokens of a book and its queries."""
        return (names + self.queries) * self.line


MINIATURE = Size(64, 3, 12, (2, 4, 8, 16), 2, 1, 1, 27, 768, 128, 1000, 50, 50, 5e-3, 0.995)
FULL = Size(
    *(128, 5, 64, (4, 8, 16, 32), 4, 2, 5, 64),
    *(4096, 512, 4000, 250, 250, 2e-3, 0.995),
)


# --- 1. Training and testing ---


def whole_numbers(number_length):
    """Returns a function that computes the share of numbers whose digits are all right."""

    def count(predicted, labels, weights):
        digits = (predicted == labels)[weights > 0].reshape(-1, number_length)
        return float(digits.all(axis=1).mean())

    return count


def run(name, names, size, seeds):
    """Trains the seeds of one model on books with `names` names and yields a line for each."""
    window = size.window if name == "Griffin" else None
    models = [
        griffin(name, size.num_layers, size.width, window, size.vocabulary, seed) for seed in seeds
    ]
    rows_a_step = max(1, size.tokens // size.row(names))

    def rows(count, seed):
        return phone_book(
            count,
            names,
            num_queries=size.queries,
            name_length=size.name_length,
            number_length=size.number_length,
            vocabulary_size=size.vocabulary,
            seed=seed,
        )

    start = time.perf_counter()
    curves, losses = learn(
        models,
        seeds,
        lambda seed: rows(rows_a_step, seed),
        rows(size.test_rows, 0),
        size.steps,
        size.every,
        adamw(size.learning_rate, size.warmup, size.steps, end=0.1),
        size.enough,
        count=whole_numbers(size.number_length),
    )
    seconds = time.perf_counter() - start
    for seed, model, curve, loss in zip(seeds, models, curves, losses, strict=True):
        yield {
            "model": name,
            "names": names,
            "seed": seed,
            "width": size.width,
            "window": window,
            "tokens_of_a_row": size.row(names),
            "parameters": model.count_params(),
            "rows_a_step": rows_a_step,
            "most_steps": size.steps,
            "training_loss": round(loss, 4),
            "seconds_of_all_seeds": round(seconds, 1),
            "machine": machine(),
            "right_after": curve,
        }


# --- 2. Results ---


def draw(results, size, path):
    figure = matplotlib.figure.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in MODELS:
        found = shares_by_names(results, size, name).values()
        found = [100 * np.asarray(shares) for shares in found]
        draw_band(axes, size.names, found, marker="o", label=name)
    inside = size.window // size.line - size.queries
    axes.axvline(inside, color="gray", linestyle="--", label="the window holds the whole sequence")
    axes.set(xlabel="names in the book", ylabel="numbers recalled, %", ylim=(-2, 104))
    axes.set_xscale("log", base=2)
    axes.set_xticks(size.names, [str(names) for names in size.names])
    axes.legend()
    figure.savefig(path, dpi=120)


def shares_by_names(results, size, name):
    """Returns `{names: accuracy of each seed}`."""
    return {
        names: final_shares(results.select(model=name, names=names, width=size.width))
        for names in size.names
    }


def judge(name, found, griffin_found, size):
    """A verdict in words on what each seed has right of each book."""
    means = {names: np.mean(shares) for names, shares in found.items()}
    last = max(size.names)
    if name == "MQA":
        return f"{yes(min(means.values()) >= 0.95)}: at least 95 % of all books"
    inside = max((n for n in size.names if size.row(n) <= size.window), default=None)
    if inside is None:
        return "none of these books fits into the window"
    if name == "Griffin":
        return (
            f"{yes(means[inside] >= 0.95)}: at least 95 % inside its window; "
            f"{yes(means[inside] - means[last] >= 0.30)}: 30 points less of {last} names"
        )
    below = means[inside] < np.mean(griffin_found[inside])
    return f"{yes(below)}: below Griffin inside its window"


def tell(results, size):
    """Formats a Markdown table with a row per model and a column per book."""
    found = {name: shares_by_names(results, size, name) for name in MODELS}
    rows = [
        (
            name,
            *(percent(shares) for shares in found[name].values()),
            judge(name, found[name], found["Griffin"], size),
        )
        for name in MODELS
    ]
    books = (f"{names} names, {names * size.line / size.window:g} windows" for names in size.names)
    return table(("numbers right, %", *books, ""), rows)


# --- 3. Main program ---


def main():
    parser = command_line(__doc__, MINIATURE, FULL)
    arguments, size = read_command_line(parser, MINIATURE, FULL)
    results = Results(arguments.output / "phone_book.jsonl")
    print(f"{size.num_layers} blocks of width {size.width}, on {machine()}")
    for names in size.names:
        for name in MODELS:
            key = {"model": name, "names": names, "width": size.width}
            seeds = results.missing(arguments.seeds, **key)
            for line in run(name, names, size, seeds) if seeds else ():
                results.append(**line)
                steps, share = list(line["right_after"].items())[-1]
                print(
                    f"{name}, {names} names, seed {line['seed']}: {share:.1%} right after {steps} "
                    f"steps; {line['seconds_of_all_seeds']} s",
                    flush=True,
                )
    draw(results, size, picture(arguments, "phone_book"))
    print(tell(results, size))


if __name__ == "__main__":
    main()
