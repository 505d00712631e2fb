"""Compares training steps of this package's layers with those of Keras.

Forward, backward and update of a model of one layer, by `train_on_batch` after a plain `compile`:
`jax.jit` on JAX, `tf.function` without XLA on TensorFlow, eager on torch. The layers take turns;
milliseconds, medians.
"""

import functools

import keras
import numpy as np

from benchmarks import make_parser
from benchmarks.timing import medians, print_header, print_results
from keras_recurrent.layers import HGRN2, RGLRU, LightningAttention, RecurrentBlock

WIDTH, SMALL_WIDTH = 256, 32
WIDE_SHAPES = [(8, 512), (1, 4096)]  # batch size, sequence length
SMALL_SHAPES = [(16, length) for length in (8, 20, 64, 256, 1024, 4096)]
TOKENS = 16_384  # of a step of attention
ATTENTION_SHAPES = [(TOKENS // length, length) for length in (2**n for n in range(7, 15))]
NUM_HEADS = 2


def keras_layers(width):
    return {
        "GRU": keras.layers.GRU(width, return_sequences=True),
        "LSTM": keras.layers.LSTM(width, return_sequences=True),
    }


def wide_layers():
    return {"RecurrentBlock": RecurrentBlock(WIDTH), "HGRN2": HGRN2(), **keras_layers(WIDTH)}


def small_layers():
    ours = {"RecurrentBlock": RecurrentBlock(SMALL_WIDTH), "RGLRU": RGLRU()}
    return {**ours, "HGRN2": HGRN2(expand_ratio=8), **keras_layers(SMALL_WIDTH)}


def attention_layers():
    size = WIDTH // NUM_HEADS
    softmax = keras.layers.MultiHeadAttention(NUM_HEADS, size, use_bias=False)
    return {
        "LightningAttention": LightningAttention(
            NUM_HEADS, head_dim=size, layer_index=1, num_layers=3
        ),
        "MultiHeadAttention": lambda x: softmax(x, x, use_causal_mask=True),
    }


# {work: (function that makes the layers, shapes, width, seconds and least repeats of a layer)}
WORK = {
    "wide": (wide_layers, WIDE_SHAPES, WIDTH, 6, 5),
    "small": (small_layers, SMALL_SHAPES, SMALL_WIDTH, 2, 3),
    "attention": (attention_layers, ATTENTION_SHAPES, WIDTH, 6, 5),
}


def training_step(layer, shape):
    """Returns a function without arguments that runs a training step."""
    inputs = keras.Input(shape[1:])
    model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", "mse")
    x, y = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    return functools.partial(model.train_on_batch, x, y)


def measure(work):
    make_layers, shapes, width, budget, least = WORK[work]
    for batch, length in shapes:
        layers, shape = make_layers(), (batch, length, width)
        steps = {name: training_step(layer, shape) for name, layer in layers.items()}
        times = medians(steps, budget, least)
        baseline = list(times)[-1] if work == "attention" else "GRU"
        ratios = {f"{baseline} / {n}": t for n, t in times.items() if n != baseline}
        yield {
            "shape": "×".join(map(str, shape)),
            **{name: round(1000 * t, 2) for name, t in times.items()},
            **{name: round(times[baseline] / t, 2) for name, t in ratios.items()},
        }


def main():
    parser = make_parser(__doc__)
    parser.add_argument("work", choices=WORK)
    arguments = parser.parse_args()
    print_header("float32")
    print_results(measure(arguments.work))


if __name__ == "__main__":
    main()
