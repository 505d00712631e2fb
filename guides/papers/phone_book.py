"""Griffin looks up exactly what its window holds (Griffin, section 6.2, figure 6c).

    make paper-phone_book                     # minutes; or, where the package is installed:
    KERAS_BACKEND=jax python guides/papers/phone_book.py
    KERAS_BACKEND=jax python guides/papers/phone_book.py --full     # on a GPU

De et al. 2024 (arXiv:2402.19427) show models of six and seven billion weights, trained on text, a
phone book and ask for a number in it. The Transformer with multi-query attention (MQA) finds it in
books up to the length of its training, Griffin in books up to its window of local attention, 1,024
tokens, and less and less often in longer ones; Hawk does well in very short ones alone.

Here small models are trained on books of each length from scratch. A number counts where all of
its digits are right. Griffin has one layer of local attention, in the middle. Models of one seed
share their rows.
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
    draw_band,
    machine,
    percent,
    picture,
    read_command_line,
    table,
    yes,
)
from tasks import at_the_end, griffin, learn
from training import adamw

from keras_recurrent.datasets import phone_book

MODELS = "Hawk", "Griffin", "MQA"


@dataclasses.dataclass
class Size:
    """What a run is made of."""

    width: int
    num_layers: int
    window: int  # tokens that Griffin's layer of attention sees
    names: tuple  # of a book, in growing order
    queries: int
    name_length: int
    number_length: int
    vocabulary: int
    tokens: int  # of a step, about
    test_rows: int
    steps: int  # at most, if not all seeds have `enough` right before
    every: int  # steps from one test to the next
    warmup: int  # steps in which the rate of learning rises
    learning_rate: float
    enough: float

    @property
    def line(self):
        """The tokens of a name and its number, with what begins them."""
        return 1 + self.name_length + self.number_length

    def row(self, names):
        """The tokens of a book with what is asked of it."""
        return (names + self.queries) * self.line


MINIATURE = Size(64, 3, 12, (2, 4, 8, 16), 2, 1, 1, 27, 768, 128, 1000, 50, 50, 5e-3, 0.995)
FULL = Size(
    *(128, 5, 64, (4, 8, 16, 32), 4, 2, 5, 64),
    *(4096, 512, 4000, 250, 250, 2e-3, 0.995),
)


# --- 1. Training and testing ---


def whole_numbers(number_length):
    """A function that tells the share of numbers whose digits are all right."""

    def count(predicted, labels, weights):
        digits = (predicted == labels)[weights > 0].reshape(-1, number_length)
        return float(digits.all(axis=1).mean())

    return count


def run(name, names, size, seeds):
    """Trains the seeds of one model on books of so many names, and gives a line for each."""
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


# --- 2. What came out ---


def draw(results, size, path):
    figure = matplotlib.figure.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in MODELS:
        found = [100 * np.asarray(shares) for shares in found_of(results, size, name).values()]
        draw_band(axes, size.names, found, marker="o", label=name)
    inside = size.window // size.line - size.queries
    axes.axvline(inside, color="gray", linestyle="--", label="the window holds all of the row")
    axes.set(xlabel="names of the book", ylabel="numbers, %", ylim=(-2, 104))
    axes.set_xscale("log", base=2)
    axes.set_xticks(size.names, [str(names) for names in size.names])
    axes.legend()
    figure.savefig(path, dpi=120)


def found_of(results, size, name):
    """`{names: what each seed has right}`."""
    return {
        names: at_the_end(results.of(model=name, names=names, width=size.width))
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
    """A table in Markdown: a row a model, a column a book."""
    found = {name: found_of(results, size, name) for name in MODELS}
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


# --- 3. All of it, in order ---


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
