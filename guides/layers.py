"""Compare layers of equal size on two tasks: forecasting a chaotic series, and ListOps.

    KERAS_BACKEND=jax python guides/layers.py

RecurrentBlock and HGRN2 are compared with a GRU, an LSTM and the attention of a Transformer. Only
the token mixer differs; width, depth, number of parameters, data and steps are equal. The script
takes about 15 minutes on two CPU cores; layers.md has the results. `--length 2048` is for a GPU.
"""

import argparse
import os
import pathlib
import statistics
import time

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

# Before KerasHub, whose import of TensorFlow disables the Triton kernels on JAX.
import keras_recurrent

# isort: split
import keras
import keras_hub
import matplotlib.figure
import numpy as np
from synthetic.list_ops import list_ops

from keras_recurrent.layers import HGRN2, RecurrentBlock

BLOCKS, HEADS = 2, 4
PARAMETERS = 16  # of a block, in units of the squared width; the MLP takes the rest
LEARNING_RATE = 3e-3


# --- 1. Five models that differ in their token mixer ---


class Attention(keras.layers.Layer):
    """Softmax attention of a Transformer, causal or bidirectional.

    Position encodings are added to the inputs of each block.
    """

    def __init__(self, width, causal):
        super().__init__()
        self.supports_masking = True
        self.causal = causal
        self.positions = keras_hub.layers.SinePositionEncoding()
        self.positions.supports_masking = True  # values at padding do not matter
        self.attention = keras.layers.MultiHeadAttention(HEADS, width // HEADS)

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, x, mask=None):
        x = x + self.positions(x)
        masks = {"query_mask": mask, "key_mask": mask, "value_mask": mask}
        return self.attention(x, x, **masks, use_causal_mask=self.causal)


LAYERS = {
    "RecurrentBlock": lambda width, causal: RecurrentBlock(width),
    "HGRN2": lambda width, causal: HGRN2(expand_ratio=width // HEADS),
    "GRU": lambda width, causal: keras.layers.GRU(width, return_sequences=True),
    "LSTM": lambda width, causal: keras.layers.LSTM(width, return_sequences=True),
    "attention": Attention,
}


def mixed(x, name, causal):
    """Applies residual blocks: a token mixer, then an MLP."""
    width = x.shape[-1]
    for _ in range(BLOCKS):
        mixer = LAYERS[name](width, causal)
        x = keras.layers.add([x, mixer(keras.layers.LayerNormalization()(x))])
        inner = (PARAMETERS * width**2 - mixer.count_params()) // (2 * width)
        y = keras.layers.Dense(inner, "gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.add([x, keras.layers.Dense(width)(y)])
    return keras.layers.LayerNormalization()(x)


# --- 2. Forecasting a noisy chaotic series ---


class Forecast:
    """The Mackey-Glass equation, dx/dt = 0.2 x(t - 17) / (1 + x(t - 17)^10) - 0.1 x(t).

    A model reads noisy samples, two units of time apart, and predicts at each sample the noiseless
    value `AHEAD` samples later. The error is relative to the series' standard deviation, so that
    predicting the mean has an error of 1; it is measured in the second half of each sequence.
    """

    score_name = "error"
    batch_size = 32
    AHEAD, NOISE, LENGTH, SPACING = 12, 0.3, 128, 20

    def __init__(self, rows, epochs, held_out, width):
        self.epochs, self.width = epochs, width
        self.title = f"Mackey-Glass, {self.LENGTH} samples, {self.AHEAD} ahead"
        series = self.simulate(rows + held_out, seed=0)
        series = (series - series.mean()) / series.std()
        noise = np.random.default_rng(1).normal(size=series.shape) * self.NOISE
        x = (series + noise)[:, : self.LENGTH, None].astype("float32")
        y = series[:, self.AHEAD :, None].astype("float32")
        self.training, self.held_out = (x[:rows], y[:rows]), (x[rows:], y[rows:])

    def simulate(self, rows, seed, step=0.1, delay=170, warm_up=3000):
        """Simulates series with random initial values by Heun's method."""
        samples = self.LENGTH + self.AHEAD
        values = np.empty((delay + 1 + warm_up + samples * self.SPACING, rows))
        values[: delay + 1] = np.random.default_rng(seed).uniform(0.2, 1.4, (delay + 1, rows))

        def slope(now, before):
            return 0.2 * before / (1 + before**10) - 0.1 * now

        for i in range(delay, len(values) - 1):
            first = slope(values[i], values[i - delay])
            second = slope(values[i] + step * first, values[i - delay + 1])
            values[i + 1] = values[i] + step * (first + second) / 2
        return values[-samples * self.SPACING :: self.SPACING].T

    def build(self, name):
        inputs = keras.Input((None, 1))
        x = mixed(keras.layers.Dense(self.width)(inputs), name, causal=True)
        return keras.Model(inputs, keras.layers.Dense(1)(x))

    def loss(self):
        return keras.losses.MeanSquaredError()

    def score(self, outputs):
        half = self.LENGTH // 2
        return float(np.sqrt(np.square(outputs - self.held_out[1])[:, half:].mean()))

    def floor(self):
        """Error of repeating the last sample."""
        return "the last sample again", self.score(self.held_out[0])


# --- 3. Long sequences of nested operations ---


class ListOps:
    """ListOps with lengths from a quarter of the maximum on; see `synthetic/list_ops.py`."""

    score_name = "accuracy"
    batch_size = 16

    def __init__(self, rows, epochs, held_out, width, length):
        self.epochs, self.width = epochs, width
        self.title = f"ListOps, {length // 4} to {length} tokens"
        x, y = list_ops(rows + held_out, min_length=length // 4, max_length=length)
        self.training, self.held_out = (x[:rows], y[:rows]), (x[rows:], y[rows:])

    def build(self, name):
        inputs = keras.Input((None,), dtype="int32")
        x = keras.layers.Embedding(16, self.width, mask_zero=True)(inputs)
        x = keras.layers.GlobalAveragePooling1D()(mixed(x, name, causal=False))
        return keras.Model(inputs, keras.layers.Dense(10)(x))

    def loss(self):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def score(self, outputs):
        return float((outputs.argmax(axis=-1) == self.held_out[1]).mean())

    def floor(self):
        """Accuracy of always predicting the most frequent class."""
        return "the most frequent class", float(
            np.bincount(self.held_out[1]).max() / len(self.held_out[1])
        )


# --- 4. Training: scores, seconds and memory ---


class Seconds(keras.callbacks.Callback):
    """Records the seconds of each epoch."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)


def train(task, name, seeds):
    """Returns `(parameters, scores, seconds per epoch, bytes of a batch or None)`."""
    scores, seconds = [], []
    for seed in range(seeds):
        keras.utils.set_random_seed(seed)
        model = task.build(name)
        x, y = task.training
        steps = task.epochs * -(-len(x) // task.batch_size)
        rate = keras.optimizers.schedules.CosineDecay(
            0.0, steps, warmup_target=LEARNING_RATE, warmup_steps=max(1, steps // 10)
        )
        optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01, clipnorm=1.0)
        keras_recurrent.exclude_from_weight_decay(optimizer, model)
        model.compile(optimizer, task.loss())
        clock = Seconds()
        model.fit(x, y, task.batch_size, task.epochs, callbacks=[clock], verbose=0)
        seconds += clock.seconds[1:]  # the first epoch includes compilation
        outputs = model.predict(task.held_out[0], batch_size=task.batch_size, verbose=0)
        scores.append(task.score(outputs))
    memory = memory_of(model, x[: task.batch_size], y[: task.batch_size])
    return model.count_params(), scores, statistics.median(seconds), memory


def memory_of(model, x, y):
    """Returns the bytes of a forward and backward pass without weights and data, or None."""
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            model.train_on_batch(x, y)
            return torch.cuda.max_memory_allocated() - held
    if backend != "jax":
        return None
    import jax

    fixed = [variable.value for variable in model.non_trainable_variables]

    def loss(weights, x, y):
        return model.loss(y, model.stateless_call(weights, fixed, x, training=True)[0])

    weights = [variable.value for variable in model.trainable_variables]
    analysis = jax.jit(jax.grad(loss)).lower(weights, x, y).compile().memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


# --- 5. Table, figure and main program ---


def report(task, results):
    """Yields the lines of a Markdown table."""
    yield f"| {task.title} | parameters | {task.score_name} | seconds per epoch | MiB a batch |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, (parameters, scores, seconds, memory) in results.items():
        score = f"{statistics.mean(scores):.3f} ± {statistics.pstdev(scores):.3f}"
        shown = "" if memory is None else f"{memory / 2**20:,.0f}"
        yield f"| {name} | {parameters:,} | {score} | {seconds:.2f} | {shown} |"
    name, score = task.floor()
    yield f"| {name} | | {score:.3f} | | |"


def draw(tasks, results, path):
    figure = matplotlib.figure.Figure(figsize=(9, 3.6), layout="constrained")
    for axes, task, found in zip(figure.subplots(1, 2), tasks, results, strict=True):
        for name, (_, scores, seconds, _) in found.items():
            axes.plot([seconds] * len(scores), scores, "o", label=name)
        axes.set(title=task.title, xlabel="seconds per epoch", ylabel=task.score_name)
        axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=512, help="maximum tokens of ListOps")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rows", type=int, default=512, help="training sequences of each task")
    parser.add_argument("--epochs", type=int, default=4, help="on ListOps; forecasting has twice")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/layers"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows, epochs, held_out = arguments.rows, arguments.epochs, max(32, arguments.rows // 2)
    tasks: list = [
        Forecast(rows, 2 * epochs, held_out, arguments.width),
        ListOps(rows, epochs, held_out, arguments.width, arguments.length),
    ]

    results = []
    for task in tasks:
        found = {}
        print(
            f"\n{task.title}, {rows} rows, {task.epochs} epochs, on {keras.backend.backend()}",
            flush=True,
        )
        for name in arguments.layers:
            found[name] = train(task, name, arguments.seeds)
            print(
                f"{name}: {task.score_name} {found[name][1]}, {found[name][2]:.2f} s an epoch",
                flush=True,
            )
        results.append(found)
        print("", *report(task, found), "", sep="\n", flush=True)
    picture = arguments.output / "layers.png"
    draw(tasks, results, picture)
    print(f"Drawn in {picture}")


if __name__ == "__main__":
    main()
