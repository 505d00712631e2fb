"""Recall by HGRN2 and HGRN: a matrix state compared with a vector state of the same width.

    KERAS_BACKEND=jax python guides/associative_recall.py

In multi-query associative recall (Arora et al. 2023, arXiv:2312.04927) a model reads pairs of a key
and a value, then keys alone, and predicts the value of each key. Its state must hold all pairs. An
HGRN has one number per channel. An HGRN2 expands the state of each head to a matrix, without
additional weights, and looks up values by their keys (Qin et al. 2024, arXiv:2404.07904).
"""

import argparse
import math
import os
import pathlib

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import matplotlib.figure
from synthetic.associative_recall import associative_recall

from keras_recurrent import exclude_from_weight_decay
from keras_recurrent.layers import HGRN, HGRN2, CausalConv1D, LowerBounds, RMSNorm, StreamingLayer
from keras_recurrent.models import HGRN2ResidualBlock

VOCABULARY = 64
WIDTH = 64
HEAD = 32  # channels per head of HGRN2, and the ratio of its state's size to that of HGRN
LAYERS = 2
BATCH_SIZE = 64
LEARNING_RATE = 5e-3


# --- 1. Two models with equal projections and different states ---


class ProjectedHGRN(StreamingLayer):
    """HGRN with the norm and output projection that HGRN2 has after its recurrence.

    Both layers then have four kernels of the squared width: HGRN's output gate corresponds to
    HGRN2's query.
    """

    def build(self, input_shape):
        super().build(input_shape)
        self.hgrn = HGRN(name="hgrn")
        self.norm = RMSNorm(zero_centered=False, name="norm")
        self.projection = keras.layers.Dense(self.width, use_bias=False, name="projection")
        for layer in (self.hgrn, self.norm, self.projection):
            layer.build(input_shape)

    def streaming_sublayers(self):
        return {"hgrn": self.hgrn}

    def check_arguments(self, inputs, lower_bound=None, **kwargs):
        super().check_arguments(inputs, **kwargs)

    def stream(self, inputs, tokens, state, lower_bound=None):
        h, after = self.hgrn(
            inputs,
            lower_bound=lower_bound,
            tokens=tokens,
            initial_state=state.get("hgrn"),
            return_state=True,
        )
        return self.projection(self.norm(h)), {"hgrn": after}


MIXERS = {"HGRN": lambda head: ProjectedHGRN(), "HGRN2": lambda head: HGRN2(expand_ratio=head)}


def build(name, vocabulary=VOCABULARY, width=WIDTH, head=HEAD):
    """Builds a model: embedding, short convolution, residual blocks, logits."""
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(tokens)
    x = keras.layers.add([x, CausalConv1D(3)(x)])  # gives a value access to the key before it
    x = residual_blocks(x, [MIXERS[name](head) for _ in range(LAYERS)], intermediate_dim=2 * width)
    return keras.Model(tokens, keras.layers.Dense(vocabulary)(x), name=name)


def residual_blocks(x, mixers, intermediate_dim):
    """Wraps each token mixer in a residual block, with shared lower bounds, and adds a norm."""
    bounds = LowerBounds(len(mixers))(x)
    for i, mixer in enumerate(mixers):
        block = HGRN2ResidualBlock(mixer, intermediate_dim)
        x = block(x, lower_bound=bounds[i - 1] if i else None)
    return RMSNorm()(x)


def state_size(model):
    """Returns the number of values in one sequence's state, over all blocks."""
    blocks = [layer for layer in model.layers if isinstance(layer, HGRN2ResidualBlock)]
    specs = keras.tree.flatten([block.state_spec(batch_size=1) for block in blocks])
    return sum(math.prod(spec.shape) for spec in specs if spec.dtype != "int32")


# --- 2. Training, by `fit` ---


class Report(keras.callbacks.Callback):
    """Prints and records the validation accuracy after each epoch."""

    def __init__(self):
        super().__init__()
        self.accuracy = []

    def on_epoch_end(self, epoch, logs=None):
        self.accuracy.append(logs["val_accuracy"])
        print(f"{self.model.name}, epoch {epoch + 1}: {self.accuracy[-1]:.1%} right", flush=True)


def train(name, training, validation, epochs):
    """Trains a model and returns a report of its held-out accuracy by epoch."""
    keras.utils.set_random_seed(0)
    model = build(name)
    parameters, state = model.count_params(), state_size(model)
    print(f"\n{name}: {parameters:,} parameters, {state:,} numbers in its state")
    tokens, labels, weights = training
    steps = epochs * -(-len(tokens) // BATCH_SIZE)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=LEARNING_RATE, warmup_steps=max(1, steps // 10)
    )
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01, clipnorm=1.0)
    exclude_from_weight_decay(optimizer, model)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    report = Report()
    model.fit(
        tokens,
        labels,
        sample_weight=weights,  # only answers to queries count
        validation_data=validation,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        callbacks=[report],
        verbose=0,
    )
    return report


def draw(reports, pairs, path):
    figure = matplotlib.figure.Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, report in reports.items():
        epochs = range(1, len(report.accuracy) + 1)
        axes.plot(epochs, [100 * a for a in report.accuracy], "o-", label=name)
    axes.axhline(100 / pairs, color="gray", linestyle="--", label="one of the values seen")
    axes.set(xlabel="epoch", ylabel="values recalled, %", title=f"{pairs} pairs, width {WIDTH}")
    axes.set_ylim(0, 104)
    axes.legend()
    figure.savefig(path, dpi=120)


# --- 3. Main program ---


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--length", type=int, default=48, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=6400, help="rows to train on")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/recall"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    task = (arguments.pairs, arguments.length, VOCABULARY)
    training = associative_recall(arguments.rows, *task, seed=0)
    validation = associative_recall(1024, *task, seed=1)
    print(f"{arguments.pairs} pairs in {arguments.length} tokens, on {keras.backend.backend()}")
    reports = {name: train(name, training, validation, arguments.epochs) for name in MIXERS}

    picture = arguments.output / "accuracy.png"
    draw(reports, arguments.pairs, picture)
    print(f"\nThe accuracy is drawn in {picture}")


if __name__ == "__main__":
    main()
