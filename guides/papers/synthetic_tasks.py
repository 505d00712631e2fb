"""Copying and induction by Hawk, Griffin and a Transformer (Griffin, figures 6a and 6b).

In selective copying, data tokens among noise must be repeated in order. In the induction heads
task, a sequence ends with a special token that occurred before, and the token that followed it is
the answer. Models with the same seed train on the same sequences.
"""

import numpy as np
from runs import Panel, clear, deviations, mean_with_error, octaves, yes
from synthetic.induction_heads import induction_heads
from synthetic.selective_copying import selective_copying
from tasks import ENOUGH, GRIFFINS, final_percentage, griffin, learn, right
from training import predictor

VOCABULARY = 16
LEARNED = 99  # final percentage of a model that learned the task
QUICK = 0.9  # accuracy to which steps are counted
# Claims about the longest sequences of the induction test.
CLAIMS = {
    "Hawk": ("at least 95 %", lambda percentage: percentage >= 95),
    "Griffin": ("at least 90 %", lambda percentage: percentage >= 90),
    "MQA": ("at most 50 %", lambda percentage: percentage <= 50),
}
SIZES = {  # lengths are tokens
    "width": (64, 64),
    "num_layers": (5, 5),
    "rows": (24, 32),  # batch size
    "test_rows": (256, 512),
    "copying_length": (16, 1024),
    "copying_data": (3, 16),
    "copying_window": (8, 512),
    "copying_steps": (500, 5000),  # maximum: training ends when all seeds have learned
    "induction_length": (16, 256),
    "induction_window": (8, 128),
    "induction_steps": (400, 8000),  # all are run, because longer sequences are learned late
    "longest": (128, 8192),  # longest sequence in the induction test
    "every": (20, 250),  # steps between tests
    "warmup": (50, 500),  # steps of learning rate warmup
    "learning_rate": (2e-3, 2e-3),  # its maximum
}


def runs(size, results):
    for task in ("copying", "induction"):
        length = getattr(size, f"{task}_length")
        for name in GRIFFINS:
            yield {"task": task, "model": name, "width": size.width, "length": length}


def measure(key, seeds, size, data):
    task, length = key["task"], key["length"]
    window, steps = (getattr(size, f"{task}_{what}") for what in ("window", "steps"))

    def rows(count, seed, length=length):
        common = {"sequence_length": length, "vocabulary_size": VOCABULARY, "seed": seed}
        if task == "copying":
            return selective_copying(count, num_data=size.copying_data, **common)
        return induction_heads(count, **common)

    models = [griffin(key["model"], size, window, VOCABULARY, seed) for seed in seeds]
    enough = ENOUGH if task == "copying" else None
    training = size.rows, steps, size.learning_rate, size.warmup, enough
    lines = learn(models, seeds, rows, size, *training)
    for tested in octaves(length // 2, size.longest) if task == "induction" else ():
        tokens, *answers = rows(size.test_rows, 1, tested)
        predict = predictor(models[0], batch_size=max(1, 2**17 // tested))
        for line, model in zip(lines, models, strict=True):
            share = round(right(predict(model, tokens), *answers), 4)
            line.setdefault("right_at", {})[str(tested)] = share
    return lines


def values_at(line, steps):
    """Returns the percentage at each step; a curve that ended early keeps its last value."""
    last = 0.0
    return [100 * (last := line["right_after"].get(str(step), last)) for step in steps]


class Speed:
    """Steps to 90 % of each seed; one that does not reach them counts as the maximum."""

    def __init__(self, lines, most):
        curves = [line["right_after"] for line in lines]
        reached = [next((int(n) for n, v in c.items() if v >= QUICK), None) for c in curves]
        self.late = reached.count(None)
        self.steps = np.array([steps or most for steps in reached])
        self.text = f"90 % after {mean_with_error(self.steps, 0)}"
        if self.late:
            self.text += f" at least: {self.late} of {len(lines)} not within {most:,}"
        self.text += " steps"

    def compare(self, name, transformer):
        """Formats the paper's claim about Hawk or Griffin and the Transformer."""
        signs = {(False, False): "", (True, False): "≥ ", (False, True): "≤ "}
        sign = signs.get((self.late > 0, transformer.late > 0))
        ratio = mean_with_error(self.steps / transformer.steps, 2)
        text = f"{self.text}, {'-' if sign is None else sign + ratio} of MQA's"
        if name == "Hawk":
            holds = clear(transformer.steps, self.steps) and not transformer.late
            return f"{text}; {yes(holds)}: slower than MQA by more than 2 deviations"
        gap = np.mean(self.steps) - np.mean(transformer.steps)
        noise = 2 * np.hypot(deviations(self.steps), deviations(transformer.steps))
        holds = gap <= np.fmax(noise, 0.25 * np.mean(transformer.steps)) and not self.late
        return f"{text}; {yes(holds)}: within 2 deviations of MQA, or a quarter, or faster"


def learned(percentages):
    return f"{yes(np.mean(percentages) >= LEARNED)}: at least 99 % right"


def copying(found, size):
    steps = range(size.every, size.copying_steps + 1, size.every)
    curves, verdicts = {}, {}
    speeds = {name: Speed(lines, size.copying_steps) for name, lines in found.items()}
    for name, lines in found.items():
        values = np.transpose([values_at(line, steps) for line in lines])
        curves[name] = dict(zip(steps, values, strict=True))
        compared = name != "MQA" and "MQA" in speeds
        speed = speeds[name].compare(name, speeds["MQA"]) if compared else speeds[name].text
        verdicts[name] = f"{learned([final_percentage(line) for line in lines])}; {speed}"
    labels = f"copying, {size.copying_length:,} tokens", "steps", "right, %"
    return Panel(*labels, curves, verdicts, 1, scale="linear", last=True)


def induction(found, size):
    curves, verdicts = {}, {}
    lengths = octaves(size.induction_length // 2, size.longest)
    for name, lines in found.items():
        shares = [line["right_at"] for line in lines]
        curves[name] = {n: np.array([100 * share[str(n)] for share in shares]) for n in lengths}
        claim, holds = CLAIMS[name]
        verdict = f"{yes(holds(np.mean(curves[name][lengths[-1]])))}: {claim} of the longest"
        verdicts[name] = f"{learned(curves[name][size.induction_length])}; {verdict}"
    labels = f"induction, {size.induction_length:,} tokens", "sequence length", "right, %"
    return Panel(*labels, curves, verdicts, 1, mark=size.induction_length)


def panels(results, size):
    found = results.lines_by(runs(size, results), "task", "model")
    return [copying(found.get("copying", {}), size), induction(found.get("induction", {}), size)]
