"""Copying and induction by Hawk, Griffin and a Transformer (Griffin, figures 6a and 6b).

In selective copying, data tokens among noise must be repeated in order. In the induction heads
task, a sequence ends with a special token that occurred before, and the token that followed it is
the answer. Models with the same seed train on the same sequences.
"""

import numpy as np
from runs import Panel, deviations, mean_with_error, octaves, yes
from synthetic.induction_heads import induction_heads
from synthetic.selective_copying import selective_copying
from tasks import GRIFFINS, final_shares, griffin, learn, right
from training import predictor

TASKS = "copying", "induction"
VOCABULARY = 16
LEARNED = 0.99  # final accuracy of a model that learned the task
QUICK = 0.9  # accuracy to which steps are counted
# Claims about the longest sequences of the induction test.
CLAIMS = {
    "Hawk": ("at least 95 %", lambda share: share >= 0.95),
    "Griffin": ("at least 90 %", lambda share: share >= 0.90),
    "MQA": ("at most 50 %", lambda share: share <= 0.50),
}
SIZES = {  # lengths are tokens
    "width": (64, 64),
    "num_layers": (5, 5),
    "rows": (24, 32),  # batch size
    "test_rows": (256, 512),
    "copying_length": (16, 1024),
    "copying_data": (3, 16),
    "copying_window": (8, 512),
    "copying_steps": (500, 5000),  # maximum: training ends when all seeds reach `enough`
    "induction_length": (16, 256),
    "induction_window": (8, 128),
    "induction_steps": (400, 8000),  # all are run, because longer sequences are learned late
    "longest": (128, 8192),  # longest sequence in the induction test
    "every": (20, 250),  # steps between tests
    "warmup": (50, 500),  # steps of learning rate warmup
    "learning_rate": (2e-3, 2e-3),  # its maximum
    "enough": (0.995, 0.995),
}


def runs(size, results):
    for task in TASKS:
        length = getattr(size, f"{task}_length")
        for name in GRIFFINS:
            yield {"task": task, "model": name, "width": size.width, "length": length}


def measure(key, seeds, size, data):
    task, name, length = key["task"], key["model"], key["length"]
    window, steps = (getattr(size, f"{task}_{what}") for what in ("window", "steps"))

    def rows(count, seed, length=length):
        common = {"sequence_length": length, "vocabulary_size": VOCABULARY, "seed": seed}
        if task == "copying":
            return selective_copying(count, num_data=size.copying_data, **common)
        return induction_heads(count, **common)

    models = [griffin(name, size, window, VOCABULARY, seed) for seed in seeds]
    enough = size.enough if task == "copying" else None
    training = size.rows, steps, size.learning_rate, size.warmup, enough
    lines = learn(models, seeds, rows, size, *training)
    for tested in octaves(length // 2, size.longest) if task == "induction" else ():
        tokens, *answers = rows(size.test_rows, 1, tested)
        predict = predictor(models[0], batch_size=max(1, 2**17 // tested))
        for line, model in zip(lines, models, strict=True):
            share = round(right(predict(model, tokens), *answers), 4)
            line.setdefault("right_at", {})[str(tested)] = share
    return lines


def lines_of(results, size, task):
    """Returns `{model: lines}` for the models that have results so far."""
    keys = [key for key in runs(size, results) if key["task"] == task]
    return {key["model"]: lines for key in keys if (lines := results.select(**key))}


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


def compare_speed(name, quick, transformer, most):
    """Compares the steps to 90 % with the Transformer's and formats the paper's claim.

    A seed that does not reach 90 % has None; it counts as the maximum number of steps, and the
    text says so. Without results of the Transformer there is no comparison.
    """
    late, counted = None in quick, np.array([n or most for n in quick])
    steps = mean_with_error(counted, 0)
    if late:
        steps += f" at least: {quick.count(None)} of {len(quick)} not within {most:,}"
    if name == "MQA":
        return f"90 % after {steps} steps"
    if transformer is None:
        return f"90 % after {steps} steps; MQA was not run"
    late_transformer, others = None in transformer, np.array([n or most for n in transformer])
    sign = {(False, False): "", (True, False): "≥ ", (False, True): "≤ "}.get(
        (late, late_transformer)
    )
    ratio = "-" if sign is None else sign + mean_with_error(counted / others, 2)
    steps = f"90 % after {steps} steps, {ratio} of MQA's"
    gap = np.mean(counted) - np.mean(others)
    beyond = 2 * np.hypot(deviations(counted), deviations(others))
    if name == "Hawk":
        holds = gap > beyond and not late_transformer
        return f"{steps}; {yes(holds)}: slower than MQA by more than 2 deviations"
    holds = gap <= np.fmax(beyond, 0.25 * np.mean(others)) and not late
    return f"{steps}; {yes(holds)}: within 2 deviations of MQA, or a quarter, or faster"


def learned(shares):
    return f"{yes(np.mean(shares) >= LEARNED)}: at least 99 % right"


def copying(results, size):
    found = lines_of(results, size, "copying")
    steps = range(size.every, size.copying_steps + 1, size.every)
    curves = {
        name: dict(zip(steps, 100 * curves_of(lines, steps).T, strict=True))
        for name, lines in found.items()
    }
    quick = {
        name: [steps_to(line["right_after"], QUICK) for line in lines]
        for name, lines in found.items()
    }
    verdicts = {}
    for name, lines in found.items():
        speed = compare_speed(name, quick[name], quick.get("MQA"), size.copying_steps)
        verdicts[name] = f"{learned(final_shares(lines))}; {speed}"
    labels = f"copying, {size.copying_length:,} tokens", "steps", "right, %"
    return Panel(*labels, curves, verdicts, 1, logarithmic=False, last=True)


def induction(results, size):
    curves, verdicts = {}, {}
    lengths = octaves(size.induction_length // 2, size.longest)
    for name, lines in lines_of(results, size, "induction").items():
        shares = {n: np.array([line["right_at"][str(n)] for line in lines]) for n in lengths}
        curves[name] = {n: 100 * found for n, found in shares.items()}
        claim, holds = CLAIMS[name]
        verdict = f"{yes(holds(np.mean(shares[lengths[-1]])))}: {claim} of the longest"
        verdicts[name] = f"{learned(shares[size.induction_length])}; {verdict}"
    labels = f"induction, {size.induction_length:,} tokens", "sequence length", "right, %"
    return Panel(*labels, curves, verdicts, 1, mark=size.induction_length)


def panels(results, size):
    return [copying(results, size), induction(results, size)]
