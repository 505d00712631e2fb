"""Griffin looks up what its attention window holds (Griffin, section 6.2, figure 6c).

Small models are trained from scratch on phone books of each length. Models with the same seed train
on the same books. A number counts if all of its digits are right. Griffin has one layer of local
attention.
"""

import numpy as np
from runs import Panel, yes
from synthetic.phone_book import phone_book
from tasks import ENOUGH, GRIFFINS, final_percentage, griffin, learn

SIZES = {
    "width": (64, 128),
    "num_layers": (3, 5),
    "window": (12, 64),  # attention window of Griffin, in tokens
    "names": ((2, 4, 8, 16), (4, 8, 16, 32)),  # in a book, in increasing order
    "queries": (2, 4),
    "name_length": (1, 2),
    "number_length": (1, 5),
    "vocabulary": (27, 64),
    "tokens": (768, 4096),  # per step, approximately
    "test_rows": (128, 512),
    "steps": (1000, 4000),  # maximum; training ends earlier when all seeds have learned
    "every": (50, 250),  # steps between tests
    "warmup": (50, 250),  # steps of learning rate warmup
    "learning_rate": (5e-3, 2e-3),
}


def line_of(size):
    """Returns the number of tokens of a name and its number, with their start token."""
    return 1 + size.name_length + size.number_length


def row_of(size, names):
    """Returns the number of tokens of a book and its queries."""
    return (names + size.queries) * line_of(size)


def runs(size, results):
    for names in size.names:
        for name in GRIFFINS:
            yield {"model": name, "names": names, "width": size.width}


def measure(key, seeds, size, data):
    def rows(count, seed):
        return phone_book(
            count,
            key["names"],
            num_queries=size.queries,
            name_length=size.name_length,
            number_length=size.number_length,
            vocabulary_size=size.vocabulary,
            seed=seed,
        )

    def whole_numbers(predicted, labels, weights):
        digits = (predicted == labels)[weights > 0].reshape(-1, size.number_length)
        return float(digits.all(axis=1).mean())

    models = [griffin(key["model"], size, size.window, size.vocabulary, seed) for seed in seeds]
    rows_a_step = max(1, size.tokens // row_of(size, key["names"]))
    training = rows_a_step, size.steps, size.learning_rate, size.warmup, ENOUGH
    return learn(models, seeds, rows, size, *training, whole_numbers)


def judge(name, found, griffin_found, size):
    """Formats the verdict on the percentages by book of a model and of Griffin."""
    means = {names: np.mean(shares) for names, shares in found.items()}
    last = max(size.names)
    if name == "MQA":
        return f"{yes(min(means.values()) >= 95)}: at least 95 % of all books"
    inside = max((n for n in size.names if row_of(size, n) <= size.window), default=None)
    if inside is None:
        return "none of these books fits into the window"
    if name == "Griffin":
        return (
            f"{yes(means[inside] >= 95)}: at least 95 % inside its window; "
            f"{yes(means[inside] - means[last] >= 30)}: 30 points lower for {last} names"
        )
    return f"{yes(means[inside] < np.mean(griffin_found[inside]))}: below Griffin inside its window"


def panels(results, size):
    curves = results.curves(runs(size, results), "model", "names", final_percentage)
    verdicts = {name: judge(name, curves[name], curves["Griffin"], size) for name in GRIFFINS}
    inside = size.window // line_of(size) - size.queries  # the window holds the whole sequence
    labels = "phone books", "names", "numbers right, %"
    return [Panel(*labels, curves, verdicts, digits=1, mark=inside)]
