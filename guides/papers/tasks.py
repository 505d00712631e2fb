"""Shared code of the scripts that train on tasks: Griffin's models, learning curves."""

import keras
import numpy as np
from training import adamw, predictor, train

from keras_recurrent.models import GriffinBackbone, GriffinCausalLM

RECURRENT, LOCAL, GLOBAL = "recurrent", "local_attention", "global_attention"
# {model: its pattern of blocks}. Griffin's small models have one layer of local attention instead.
GRIFFINS = {"Hawk": (RECURRENT,), "Griffin": (RECURRENT, RECURRENT, LOCAL), "MQA": (GLOBAL,)}
ENOUGH = 0.995  # accuracy at which a task counts as learned
TEST_SEED = 10**6  # training uses seeds from twice this value on, a range per model seed


def griffin(name, size, window, vocabulary_size, seed):
    """Builds Hawk, Griffin with one local attention layer in the middle, or MQA (section 6)."""
    blocks = list(GRIFFINS[name][:1]) * size.num_layers
    if name == "Griffin":
        blocks[size.num_layers // 2] = LOCAL
    return language_model(
        *(blocks, size.num_layers, size.width, window, seed),
        vocabulary_size=vocabulary_size,
        num_blocks=size.width // 4,
        lru_width=size.width * 5 // 4,
    )


def language_model(
    blocks, num_layers, width, window, seed, heads=4, vocabulary_size=256, **options
):
    """Builds a Griffin with these types of blocks."""
    keras.utils.set_random_seed(seed)
    backbone = GriffinBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=num_layers,
        hidden_dim=width,
        intermediate_dim=3 * width,
        block_types=blocks,
        num_query_heads=heads,
        head_dim=width // heads,
        sliding_window=window if LOCAL in blocks else None,
        **options,
    )
    return GriffinCausalLM(backbone)


def batches(task, rows, seeds, steps):
    """Yields the batches of all seeds for each step; label weights have a mean of 1."""
    for step in range(steps):
        found = [task(rows, (2 + seed) * TEST_SEED + step) for seed in seeds]
        tokens, labels, weights = (np.stack(part) for part in zip(*found, strict=True))
        yield tokens, labels, weights / weights.mean()


def right(predicted, labels, weights):
    """Returns the accuracy on labels with a positive weight."""
    return float(np.mean((predicted == labels)[weights > 0]))


def learn(models, seeds, task, size, rows, steps, rate, warmup, enough=None, count=right):
    """Trains the seeds of a model on a task and records their test accuracy.

    Args:
        models: one model for each of `seeds`; see `train`.
        task: a function of a number of sequences and a seed that returns tokens, labels and the
            labels' weights. Seed 0 is for testing.
        size: has `test_rows`, the test sequences, and `every`, the number of steps between tests.
        rows: batch size.
        steps, rate, warmup: maximum number of steps, and the learning rate; see `adamw`.
        enough: training ends when all models reach this accuracy; None runs all steps.
        count: a function of predicted tokens, labels and weights that returns the accuracy.

    Returns:
        A dict of results for each model; `right_after` is `{steps: accuracy}`.
    """
    predict, curves = predictor(models[0]), [{} for _ in models]
    tokens, labels, weights = task(size.test_rows, 0)

    def watch(step):
        for curve, model in zip(curves, models, strict=True):
            curve[str(step)] = round(count(predict(model, tokens), labels, weights), 4)
        shares = [curve[str(step)] for curve in curves]
        print(f"step {step}: {shares} right", flush=True)
        return enough is not None and min(shares) >= enough

    optimizer = adamw(rate, warmup, steps)
    lines = train(models, optimizer, batches(task, rows, seeds, steps), size.every, watch)
    common = {"rows_a_step": rows, "most_steps": steps}
    return [
        {**line, **common, "right_after": curve} for line, curve in zip(lines, curves, strict=True)
    ]


def final_percentage(line):
    """Returns the last accuracy of a result's curve, `right_after`, in percent."""
    return 100 * list(line["right_after"].values())[-1]
