"""Shared code of the scripts that train on tasks: Griffin's models, batches, learning curves."""

import time

import keras
import numpy as np
from training import predictor, train

from keras_recurrent.models import GriffinBackbone, GriffinCausalLM

RECURRENT, LOCAL, GLOBAL = "recurrent", "local_attention", "global_attention"
TEST_SEED = 10**6  # training uses seeds from twice this value on, a range per model seed


def griffin(name, num_layers, width, window, vocabulary_size, seed):
    """Builds Hawk, Griffin with one local attention layer in the middle, or MQA (section 6)."""
    keras.utils.set_random_seed(seed)
    blocks = [{"MQA": GLOBAL}.get(name, RECURRENT)] * num_layers
    if name == "Griffin":
        blocks[num_layers // 2] = LOCAL
    backbone = GriffinBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=num_layers,
        hidden_dim=width,
        intermediate_dim=3 * width,
        lru_width=width * 5 // 4,
        num_blocks=width // 4,
        block_types=blocks,
        num_query_heads=4,
        head_dim=width // 4,
        sliding_window=window,
    )
    return GriffinCausalLM(backbone)


def batches(task, seeds, steps):
    """Yields the batches of all seeds for each step; label weights have a mean of 1."""
    for step in range(steps):
        by_seed = {seed: task((2 + seed) * TEST_SEED + step) for seed in set(seeds)}
        found = [by_seed[seed] for seed in seeds]
        tokens, labels, weights = (np.stack(part) for part in zip(*found, strict=True))
        yield tokens, labels, weights / weights.mean()


def right(predicted, labels, weights):
    """Returns the accuracy on labels with a positive weight."""
    return float(np.mean((predicted == labels)[weights > 0]))


def learn(
    models,
    seeds,
    task,
    test,
    steps,
    every,
    optimizer,
    enough=None,
    logits=None,
    count=right,
    factors=None,
):
    """Trains the seeds of a model on a task and records their test accuracy.

    Args:
        models: one model for each of `seeds`, which may repeat; see `train`.
        task: a function of a seed that returns a training batch: tokens, labels, weights.
        test: a batch for testing, in the same format.
        steps: maximum number of steps.
        every: number of steps between tests.
        optimizer: see `train`.
        enough: training ends when all models reach this accuracy; None runs all steps.
        logits, factors: see `train`.
        count: a function of predicted tokens, labels and weights that returns the accuracy.

    Returns:
        `(curves, losses)`: for each model `{steps: accuracy}`, and its final loss.
    """
    predict, curves = predictor(models[0], logits), [{} for _ in models]
    tokens, labels, weights = test
    start = time.perf_counter()

    def watch(step):
        for curve, model in zip(curves, models, strict=True):
            curve[str(step)] = round(count(predict(model, tokens), labels, weights), 4)
        shares = ", ".join(f"{curve[str(step)]:.1%}" for curve in curves)
        print(
            f"step {step:,}: {shares} right after {time.perf_counter() - start:.1f} s", flush=True
        )
        return enough is not None and all(curve[str(step)] >= enough for curve in curves)

    losses = train(models, optimizer, batches(task, seeds, steps), logits, every, watch, factors)
    return curves, losses


def final_shares(lines):
    """Returns the last accuracy of each result's curve, `right_after`."""
    return np.array([list(line["right_after"].values())[-1] for line in lines])
