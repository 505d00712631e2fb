"""Recurrences extrapolate beyond their training length (Griffin, section 6, figures 5 and 10).

    make paper-extrapolation                  # minutes; or, with the package installed:
    KERAS_BACKEND=jax python guides/papers/extrapolation.py
    KERAS_BACKEND=jax python guides/papers/extrapolation.py --full --text FILE     # on a GPU

De et al. 2024 (arXiv:2402.19427) train models with a billion weights on 2,048 tokens and evaluate
them to 32,768: the loss of Hawk and Griffin keeps falling to at least four times the training
length; that of Transformers with multi-query attention (MQA) does not. Models trained on longer
sequences, with the same number of tokens, are better at long distances.

Here the models are small and byte-level. Models with the same seed train on the same sequences,
and all are tested on the same windows of held-out text. A loss "at 512" is the mean over positions
257 to 512.
"""

import dataclasses
import os
import pathlib
import time

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import matplotlib.figure
import numpy as np
from runs import (
    PASSES,
    Results,
    command_line,
    deviations,
    draw_band,
    machine,
    octaves,
    picture,
    read_command_line,
    read_text,
    spread,
    table,
    text_batches,
    with_error,
)
from training import adamw, token_losses, train

from keras_recurrent.evaluation import LossByPosition
from keras_recurrent.models import GriffinBackbone, GriffinCausalLM

RECURRENT, LOCAL, GLOBAL = "recurrent", "local_attention", "global_attention"
# The pattern of blocks, and the fraction of each head with rotary positions.
MODELS = {
    "Hawk": ((RECURRENT,), 1.0),
    "Griffin": ((RECURRENT, RECURRENT, LOCAL), 1.0),
    "MQA RoPE": ((GLOBAL,), 1.0),
    "MQA NoPE": ((GLOBAL,), 0.0),
}


@dataclasses.dataclass
class Size:
    """Sizes of a run; lengths are bytes."""

    width: int
    lru_width: int
    num_layers: int
    lengths: tuple  # training lengths
    tokens: int  # per step
    steps: int  # at most two passes over the text
    longest: int  # length of the test windows
    windows: int
    learning_rate: float

    @property
    def places(self):
        """Positions of reported losses: doubling from half the shortest training length."""
        return octaves(min(self.lengths) // 2, self.longest)


MINIATURE = Size(64, 80, 3, (128, 256), 2048, 300, 1024, 384, 5e-3)
FULL = Size(256, 352, 6, (512, 2048), 16_384, 700, 32_768, 128, 2e-3)


# --- 1. Training and testing ---


def build(name, size, length, seed):
    keras.utils.set_random_seed(seed)
    block_types, turned = MODELS[name]
    backbone = GriffinBackbone(
        vocabulary_size=256,
        num_layers=size.num_layers,
        hidden_dim=size.width,
        intermediate_dim=3 * size.width,
        lru_width=size.lru_width,
        block_types=block_types,
        num_query_heads=4,
        head_dim=size.width // 4,
        sliding_window=length // 2,
        partial_rotary_factor=turned,
    )
    return GriffinCausalLM(backbone)


def run(name, size, length, seeds, training, windows):
    """Trains the seeds of one model in parallel and yields a line of results for each."""
    steps = min(size.steps, PASSES * len(training) // size.tokens)
    models = [build(name, size, length, seed) for seed in seeds]
    optimizer = adamw(size.learning_rate, steps // 10, steps, end=0.1)
    start = time.perf_counter()
    trained = train(models, optimizer, text_batches(training, seeds, steps, length, size.tokens))
    seconds = time.perf_counter() - start
    # Equals `keras_recurrent.evaluation.loss_by_position`, in one program.
    test = token_losses(models[0], batch_size=max(1, 2**17 // size.longest))
    for seed, model, loss in zip(seeds, models, trained, strict=True):
        losses = test(model, windows).astype("float64").mean(axis=0)
        found = LossByPosition(losses, np.full(len(losses), len(windows)))
        places = size.places
        yield {
            "model": name,
            "length": length,
            "seed": seed,
            "width": size.width,
            "parameters": model.count_params(),
            "steps": steps,
            "bytes": steps * size.tokens,
            "windows": size.windows,
            "training_loss": round(loss, 4),
            "seconds_of_all_seeds": round(seconds, 1),
            "machine": machine(),
            "loss_at": {
                str(n): round(float(found.loss[n // 2 - 1 : n - 1].mean()), 4) for n in places
            },
            "running_mean_at": {str(n): round(float(found.running_mean[n - 2]), 4) for n in places},
        }


# --- 2. Results ---


def values(lines, kind, place):
    return np.array([line[kind][str(place)] for line in lines])


def draw(results, size, names, path):
    """Plots the running mean of the loss, the paper's curve, for each training length."""
    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
    places = size.places
    (row,) = figure.subplots(1, len(size.lengths), sharey=True, squeeze=False)
    for length, axes in zip(size.lengths, row, strict=True):
        for name in names:
            lines = results.select(model=name, length=length, width=size.width)
            points = [values(lines, "running_mean_at", place) for place in places]
            draw_band(axes, places, points, label=name)
        axes.axvline(length, color="gray", linestyle="--", linewidth=1)
        axes.set(xlabel="bytes read", title=f"trained on sequences of {length:,} bytes")
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:,}" for place in places])
    figure.axes[0].set_ylabel("mean loss so far, nats per byte")
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def changes(lines, length):
    """Returns, per seed, the loss at four times the length minus that at the length."""
    return values(lines, "loss_at", 4 * length) - values(lines, "loss_at", length)


# Claims about the loss at 4 L minus that at L. MQA without positions has none.
CLAIMS = {
    "Hawk": ("at most 0", lambda mean: mean <= 0),
    "Griffin": ("at most .01", lambda mean: mean <= 0.01),
    "MQA RoPE": ("at least .3", lambda mean: mean >= 0.3),
}


def judge(name, found, others):
    """Formats the verdict: the claim, and if the gap to RoPE exceeds two deviations.

    others: the values of MQA with RoPE; None if it was not run.
    """
    if name not in CLAIMS:
        return "told"
    claim, holds = CLAIMS[name]
    text = f"{'yes' if holds(np.mean(found)) else 'NO'}: {claim}"
    if name == "MQA RoPE" or others is None:
        return text
    gap = np.mean(others) - np.mean(found)
    clear = gap > 2 * np.hypot(deviations(found), deviations(others))
    return f"{text}; {'' if clear else 'NOT '}beyond 2 deviations of RoPE"


def tell(results, size, names):
    """Formats Markdown tables: one per training length, and one with all training lengths."""
    parts = []
    for length in size.lengths:
        places = [n for n in octaves(length, size.longest) if n <= 16 * length]
        if 4 * length not in places:
            continue
        rope = results.select(model="MQA RoPE", length=length, width=size.width)
        rope = changes(rope, length) if rope else None
        header = (
            f"sequences of {length:,} bytes: loss at",
            *(f"{n:,}" for n in places),
            "4 L less L",
            "",
        )
        rows = []
        for name in names:
            lines = results.select(model=name, length=length, width=size.width)
            found = changes(lines, length)
            cells = (with_error(values(lines, "loss_at", n)) for n in places)
            rows.append((name, *cells, with_error(found), judge(name, found, rope)))
        parts.append(table(header, rows))
    rows, header = [], ("mean loss to", *(f"{n:,}" for n in size.places))
    for name in (name for name in ("Hawk", "Griffin") if name in names):
        for length in size.lengths:
            lines = results.select(model=name, length=length, width=size.width)
            cells = (with_error(values(lines, "running_mean_at", n)) for n in size.places)
            rows.append((f"{name}, sequences of {length:,} bytes", *cells))
    return "\n\n".join([*parts, table(header, rows)])


# --- 3. Main program ---


def main():
    parser = command_line(__doc__, MINIATURE, FULL)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--text", type=pathlib.Path, help="a file; else Python's documentation")
    arguments, size = read_command_line(parser, MINIATURE, FULL)
    training, held_out = read_text(arguments.text)
    # From the shortest training length on, each octave of positions sees the same text.
    windows = spread(held_out, size.windows, min(size.lengths) // 2, size.longest)
    results = Results(arguments.output / "extrapolation.jsonl")
    print(f"{len(training):,} bytes to train on, {len(held_out):,} held out, on {machine()}")
    for length in size.lengths:
        for name in arguments.models:
            key = {"model": name, "length": length, "width": size.width}
            seeds = results.missing(arguments.seeds, **key)
            for line in run(name, size, length, seeds, training, windows) if seeds else ():
                results.append(**line)
                print(
                    f"{name}, {length:,} bytes, seed {line['seed']}: loss at {length:,} "
                    f"{line['loss_at'][str(length)]}, at {size.longest:,} "
                    f"{line['loss_at'][str(size.longest)]}; {line['seconds_of_all_seeds']} s",
                    flush=True,
                )
    draw(results, size, arguments.models, picture(arguments, "extrapolation"))
    print(tell(results, size, arguments.models))


if __name__ == "__main__":
    main()
