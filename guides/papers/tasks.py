"""What the guides that train models on tasks share: Griffin's three models, batches, curves."""

import keras
import numpy as np
from training import predictor, train

from keras_recurrent.models import GriffinBackbone, GriffinCausalLM

RECURRENT, LOCAL, GLOBAL = "recurrent", "local_attention", "global_attention"
TEST_SEED = 10**6  # of training rows it is twice that and more, a range for each model's seed


def griffin(name, num_layers, width, window, vocabulary_size, seed):
    """Hawk, Griffin with one layer of local attention in the middle, or MQA, as in section 6."""
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
    """For each step, rows of every seed; the weights of their labels have a mean of 1."""
    for step in range(steps):
        of_seeds = {seed: task((2 + seed) * TEST_SEED + step) for seed in set(seeds)}
        found = [of_seeds[seed] for seed in seeds]
        tokens, labels, weights = (np.stack(part) for part in zip(*found, strict=True))
        yield tokens, labels, weights / weights.mean()


def right(predicted, labels, weights):
    """The share of the labels that count which are predicted."""
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
    """Trains the seeds of a model on a task, and looks now and then how much of a test is right.

    Args:
        models: as `train` takes them, one for each of `seeds`, which may repeat.
        task: the function of a seed that gives rows to train on: tokens, labels, weights.
        test: such rows.
        steps: the most there may be.
        every: steps from one look at the test to the next.
        optimizer: as `train` takes it.
        enough: training ends where all models have this much right; None: after all steps.
        logits, factors: as `train` takes them.
        count: the function of predicted tokens, labels and weights that tells what is right.

    Returns:
        `(curves, losses)`: for each model `{steps: share right}`, and its loss at the end.
    """
    predict, curves = predictor(models[0], logits), [{} for _ in models]
    tokens, labels, weights = test

    def watch(step):
        for curve, model in zip(curves, models, strict=True):
            curve[str(step)] = round(count(predict(model, tokens), labels, weights), 4)
        return enough is not None and all(curve[str(step)] >= enough for curve in curves)

    losses = train(models, optimizer, batches(task, seeds, steps), logits, every, watch, factors)
    return curves, losses


def at_the_end(lines):
    """What each line of results has right at the end of its curve, `right_after`."""
    return np.array([list(line["right_after"].values())[-1] for line in lines])
