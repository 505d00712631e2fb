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
from tasks import ENOUGH, final_percentage, learn

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
    "steps": (350, 1200),  # maximum; training ends earlier when all seeds have learned
    "every": (35, 100),  # steps between tests
}


def runs(size, results):
    for length, pairs in zip(size.lengths, size.pairs, strict=True):
        for width in size.widths:
            task = {"length": length, "pairs": pairs, "width": width, "most_steps": size.steps}
            for model, expansions in zip(MODELS, ((1,), size.expansions), strict=True):
                for expansion in expansions:
                    for rate in size.rates if width % expansion == 0 else ():
                        yield {"model": model, "expansion": expansion, **task, "rate": rate}


def measure(key, seeds, size, data):
    def rows(count, seed):
        return associative_recall(count, key["pairs"], key["length"], size.vocabulary, seed=seed)

    models = []
    for seed in seeds:
        keras.utils.set_random_seed(seed)
        sizes = size.vocabulary, key["width"], key["expansion"]
        models.append(models_of.build(key["model"], *sizes))
    training = size.rows, size.steps, key["rate"], size.steps // 10, ENOUGH
    lines = learn(models, seeds, rows, size, *training)
    numbers = models_of.state_size(models[0])
    return [{"state_numbers": numbers, **line} for line in lines]


def judge(hgrn, hgrn2):
    """Formats the verdict from the percentages of all seeds."""
    if min(np.mean(hgrn), np.mean(hgrn2)) >= BOTH:
        return "yes: both at least 99 %"
    return f"{yes(clear(hgrn, hgrn2))}: above HGRN by more than 2 deviations"


def panels(results, size):
    """Values recalled by width, at each model's rate and expansion of the highest mean."""
    best: dict = {}  # {length: {model: {width: (percentages, learning rate)}}}
    for key in runs(size, results):
        found = np.array([final_percentage(line) for line in results.select(**key)])
        by_width = best.setdefault(key["length"], {name: {} for name in MODELS})[key["model"]]
        before, _ = by_width.get(key["width"], ([-1], None))
        if len(found) and found.mean() > np.mean(before):
            by_width[key["width"]] = found, key["rate"]
    return [
        panel_of_task(f"{pairs} pairs in {length:,} tokens", best[length])
        for length, pairs in zip(size.lengths, size.pairs, strict=True)
    ]


def panel_of_task(title, best):
    rates, curves = (
        {name: {width: pair[i] for width, pair in best[name].items()} for name in MODELS}
        for i in (1, 0)
    )
    verdicts = {name: f"rates {rates[name]}" for name in MODELS}
    for width in curves["HGRN"]:
        if width in curves["HGRN2"]:
            verdict = judge(*(curves[name][width] for name in MODELS))
            verdicts["HGRN2"] += f"; {width}: {verdict}"
    return Panel(title, "width", "recalled, %", curves, verdicts, digits=1)
