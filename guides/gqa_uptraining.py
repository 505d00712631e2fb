"""Convert a multi-head model to grouped queries and recover its quality in 5% of its training.

    KERAS_BACKEND=jax python guides/gqa_uptraining.py

Grouped-query attention has fewer key and value heads than query heads, so that decoding reads less
memory per token. An existing model is converted by pooling its heads and a short further training,
called uptraining (Ainslie et al. 2023, arXiv:2305.13245). Figures 4 and 5 of the paper compare
pooling methods and group counts on T5; this guide does so on a small byte-level model, in about 45
minutes on two CPU cores.

Pooling requires some redundancy among heads. Weight decay and dropout provide it, as in large
models; in a small model without them, every head is needed.
"""

import argparse
import math
import os
import pathlib

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

# Before KerasHub, whose import of TensorFlow disables the Triton kernels on JAX.
import keras_recurrent  # noqa: F401

# isort: split
import keras
import keras_hub
import matplotlib.figure
import numpy as np
from quickstart import load_documents, unigram_and_bigram

from keras_recurrent.conversion import convert_to_gqa, gqa_report, uptraining

POOLINGS = ("mean", "first", "random")
HEADS, HEAD_DIM = 8, 32
DROPOUT, WEIGHT_DECAY = 0.1, 0.3
LENGTH = 128  # bytes of a sequence
BATCH_SIZE = 16
VALIDATION_ROWS, VALIDATION_BATCH_SIZE = 1024, 256
LEARNING_RATE = 2e-3


# --- 1. The text, as sequences of bytes ---


def rows_of(documents, count, rng, length=LENGTH):
    """Returns `count` random sequences and, as labels, the next byte at each position."""
    text = np.frombuffer("\n".join(documents).encode(), "uint8").astype("int32")
    starts = rng.integers(0, len(text) - length, size=count)
    rows = text[starts[:, None] + np.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


# --- 2. The multi-head model, made of Keras layers ---


def multi_head_model(width, layers, head_dim=HEAD_DIM, length=LENGTH, dropout=DROPOUT):
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(256, width)(tokens)
    x = x + keras_hub.layers.PositionEmbedding(length)(x)
    x = keras.layers.Dropout(dropout)(x)
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(HEADS, head_dim, dropout=dropout)
        x = x + keras.layers.Dropout(dropout)(attention(y, y, use_causal_mask=True))
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(3 * width, activation="gelu")(y)
        x = x + keras.layers.Dropout(dropout)(keras.layers.Dense(width)(y))
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(tokens, keras.layers.Dense(256)(x))


def compile_for_training(model, learning_rate, weight_decay=WEIGHT_DECAY):
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate, weight_decay=weight_decay, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def train_multi_head(
    seed,
    documents,
    steps,
    width,
    layers,
    head_dim=HEAD_DIM,
    length=LENGTH,
    dropout=DROPOUT,
    weight_decay=WEIGHT_DECAY,
):
    """Returns a trained multi-head model, and as many new sequences as it was trained on."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    model = multi_head_model(width, layers, head_dim, length, dropout)
    compile_for_training(model, LEARNING_RATE, weight_decay)
    rows = rows_of(documents, steps * BATCH_SIZE, rng, length)
    model.fit(*rows, batch_size=BATCH_SIZE, verbose=0)
    return model, rows_of(documents, steps * BATCH_SIZE, rng, length)


def bits_per_byte(model, validation):
    return model.evaluate(*validation, batch_size=VALIDATION_BATCH_SIZE, verbose=0) / math.log(2)


# --- 3. Convert, evaluate, uptrain, evaluate ---


def train_on(model, rows, plan, validation, weight_decay=WEIGHT_DECAY):
    """Uptrains with `plan` and returns `[(steps, bits per byte), ...]`, from step 0 on."""
    compile_for_training(model, plan.learning_rate, weight_decay)
    curve = [(0, bits_per_byte(model, validation))]
    every = max(1, plan.steps // 4)  # steps of an epoch, after which `fit` validates
    history = model.fit(
        *rows,
        batch_size=BATCH_SIZE,
        steps_per_epoch=every,
        epochs=math.ceil(plan.steps / every),
        validation_data=validation,
        validation_batch_size=VALIDATION_BATCH_SIZE,
        callbacks=plan.callbacks,
        verbose=0,
    ).history
    for i, loss in enumerate(history["val_loss"], start=1):
        curve.append((min(i * every, plan.steps), loss / math.log(2)))
    return curve


def one_seed(seed, arguments, training, validation):
    """Returns `{(groups, pooling): losses}`; the key (None, None) is the multi-head model."""
    model, more = train_multi_head(
        seed, training, arguments.steps, arguments.width, arguments.layers
    )
    print(f"seed {seed}: multi-head, {bits_per_byte(model, validation):.3f} bits per byte")

    curves: dict = {}
    for groups in arguments.groups:
        for pooling in POOLINGS:
            grouped = convert_to_gqa(model, groups, pooling=pooling, seed=seed)
            plan = uptraining(arguments.steps, LEARNING_RATE)
            curve = train_on(grouped, more, plan, validation)
            curves[groups, pooling] = curve
            print(f"  {groups} groups, {pooling}: {curve[0][1]:.3f} → {curve[-1][1]:.3f}")
        if seed == 0 and groups == arguments.groups[0]:
            print(gqa_report(model, grouped, context_length=4096))
    # The baseline: the multi-head model, trained for as many steps. Last, because it changes.
    plan = uptraining(arguments.steps, LEARNING_RATE)
    curves[None, None] = train_on(model, more, plan, validation)
    return curves


# --- 4. Table, figure and main program ---


def table(results, all_groups):
    def cell(key, at):
        losses = [curves[key][at][1] for curves in results]
        return f"{np.mean(losses):.3f} ± {np.std(losses):.3f}"

    lines = [
        "| groups | pooling | after conversion | after uptraining |",
        "| ---: | --- |" + 2 * " ---: |",
    ]
    lines.append(f"| {HEADS} | (multi-head) | {cell((None, None), 0)} | {cell((None, None), -1)} |")
    for key in ((groups, pooling) for groups in all_groups for pooling in POOLINGS):
        lines.append(f"| {key[0]} | {key[1]} | {cell(key, 0)} | {cell(key, -1)} |")
    return "\n".join(lines)


def draw(results, all_groups, path):
    figure = matplotlib.figure.Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(all_groups), sharey=True, squeeze=False)[0]
    for axes, groups in zip(panels, all_groups, strict=True):
        for pooling, color in zip(POOLINGS, ("tab:blue", "tab:orange", "tab:green"), strict=True):
            for i, curves in enumerate(results):
                label = pooling if i == 0 else None
                axes.plot(*zip(*curves[groups, pooling], strict=True), color=color, label=label)
        for i, curves in enumerate(results):
            label = "multi-head" if i == 0 else None
            axes.plot(*zip(*curves[None, None], strict=True), "--", color="gray", label=label)
        axes.set(xlabel="steps of uptraining", title=f"{groups} of {HEADS} key-value heads")
    panels[0].set_ylabel("bits per byte, validation")
    panels[-1].legend()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6000, help="of the multi-head training")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--groups", type=int, nargs="+", default=(4, 2, 1))
    parser.add_argument("--topics", type=int, help="maximum number of topics to read")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/gqa_uptraining"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    training, held_out = load_documents(arguments.topics)
    validation = rows_of(held_out, VALIDATION_ROWS, np.random.default_rng(0))
    unigram, bigram = unigram_and_bigram(training, held_out)
    print(f"counting: bigrams {bigram:.3f}, unigrams {unigram:.3f} bits per byte")
    results = [one_seed(i, arguments, training, validation) for i in range(arguments.seeds)]

    print(f"\nBits per byte, mean ± standard deviation of {arguments.seeds} seeds:\n")
    print(table(results, arguments.groups))
    picture = arguments.output / "loss.png"
    draw(results, arguments.groups, picture)
    print(f"\nThe losses are drawn in {picture}")


if __name__ == "__main__":
    main()
