"""HGRN2 recalls more than HGRN at the same width (HGRN2, section 4.1, figure 3).

The models are those of guides/associative_recall.py: two layers of HGRN2, or of HGRN with a norm
and an output projection, with about the same number of parameters. HGRN's state has one number per
channel, HGRN2's `expansion`. The best of a few learning rates and expansions counts.
"""

import associative_recall as models_of
import keras
import numpy as np
from runs import Panel, clear, yes
from synthetic.associative_recall import associative_recall
from tasks import final_shares, learn
from training import apply

MODELS = "HGRN", "HGRN2"
BOTH = 99  # %: if both models reach this accuracy, neither is better
SIZES = {
    "lengths": ((32,), (256, 512)),  # tokens of a sequence; one value per task
    "pairs": ((8,), (16, 64)),  # keys with a value in a sequence; one value per task
    "vocabulary": (64, 1024),
    "widths": ((32, 64), (64, 128, 256)),
    "expansions": ((32,), (64, 128)),  # expansion ratios of HGRN2, if they divide the width
    "rates": ((5e-3, 1e-2), (1e-3, 5e-3, 1e-2)),  # learning rates; the best one counts
    "rows": (32, 32),  # batch size
    "test_rows": (256, 512),
    "steps": (350, 1200),  # maximum; training ends earlier when all seeds reach `enough`
    "every": (35, 100),  # steps between tests
    "enough": (0.995, 0.995),
}


def runs(size, results):
    for length, pairs in zip(size.lengths, size.pairs, strict=True):
        for width in size.widths:
            task = {"length": length, "pairs": pairs, "width": width, "most_steps": size.steps}
            for model, expansions in zip(MODELS, ((1,), size.expansions), strict=True):
                for expansion in expansions:
                    for rate in size.rates if width % expansion == 0 else ():
                        yield {"model": model, "expansion": expansion, **task, "rate": rate}


def build(key, size, seed):
    keras.utils.set_random_seed(seed)
    return models_of.build(key["model"], size.vocabulary, key["width"], key["expansion"])


def measure(key, seeds, size, data):
    def rows(count, seed):
        return associative_recall(count, key["pairs"], key["length"], size.vocabulary, seed=seed)

    models = [build(key, size, seed) for seed in seeds]
    training = size.rows, size.steps, key["rate"], size.steps // 10, size.enough
    lines = learn(models, seeds, rows, size, *training, apply)
    numbers = models_of.state_size(models[0])
    return [{"state_numbers": numbers, **line} for line in lines]


def best(results, size, name, **task):
    """Returns the lines, one per seed, of the rate and expansion with the highest final mean."""
    task = {"model": name, **task}
    keys = (key for key in runs(size, results) if task.items() <= key.items())
    found = filter(None, (results.select(**key) for key in keys))
    return max(found, key=lambda lines: np.mean(final_shares(lines)), default=[])


def judge(hgrn, hgrn2):
    """Formats the verdict from the percentages of all seeds."""
    if min(np.mean(hgrn), np.mean(hgrn2)) >= BOTH:
        return "yes: both at least 99 %"
    return f"{yes(clear(hgrn, hgrn2))}: above HGRN by more than 2 deviations"


def panels(results, size):
    """Values recalled by width, at each model's best setting, for each task."""
    found = []
    for length, pairs in zip(size.lengths, size.pairs, strict=True):
        task = {"length": length, "pairs": pairs}
        lines = {
            name: {
                w: seeds
                for w in size.widths
                if (seeds := best(results, size, name, width=w, **task))
            }
            for name in MODELS
        }
        curves = {
            name: {width: 100 * final_shares(seeds) for width, seeds in by_width.items()}
            for name, by_width in lines.items()
        }
        rates = {n: {w: seeds[0]["rate"] for w, seeds in f.items()} for n, f in lines.items()}
        judged = {
            w: judge(*(curves[name][w] for name in MODELS))
            for w in size.widths
            if all(w in curve for curve in curves.values())
        }
        verdicts = {name: f"rates {rates[name]}" for name in MODELS}
        verdicts["HGRN2"] += "".join(f"; {w}: {text}" for w, text in judged.items())
        title = f"{pairs} pairs in {length:,} tokens"
        found.append(Panel(title, "width", "recalled, %", curves, verdicts, digits=1))
    return found
