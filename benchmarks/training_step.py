"""Time one training step of RecurrentBlock beside Keras's own recurrent layers, on one backend.

Prints JSON; `python benchmarks/cpu.py` runs it for every backend and makes a table of it.
"""

import json
import statistics
import time

import keras
import numpy as np

from keras_recurrent.layers import RecurrentBlock

WIDTH = 256
SHAPES = [(8, 512, WIDTH), (1, 4096, WIDTH)]
SECONDS, LEAST, MOST = 6, 5, 50  # measure a layer this long, but this often at least and at most


def layers():
    return {
        "RecurrentBlock": RecurrentBlock(WIDTH),
        "GRU": keras.layers.GRU(WIDTH, return_sequences=True),
        "LSTM": keras.layers.LSTM(WIDTH, return_sequences=True),
    }


def training_step(layer, shape):
    """A function without arguments: forward, backward and update, compiled as Keras would."""
    model = keras.Sequential([keras.Input(shape[1:]), layer])
    model.compile(optimizer="sgd", loss="mse")
    x, y = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    return lambda: model.train_on_batch(x, y)


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def medians(calls):
    """The median time of each call. They take turns, so that a busy moment hits all of them."""
    rounds = {}
    for name, call in calls.items():
        seconds(call)  # traces and compiles
        rounds[name] = min(MOST, max(LEAST, round(SECONDS / seconds(call))))
    times = {name: [] for name in calls}
    for i in range(max(rounds.values())):
        for name, call in calls.items():
            if i < rounds[name]:
                times[name].append(seconds(call))
    return {name: statistics.median(t) for name, t in times.items()}


def matrix_product_rate(n=1024):
    """Floating-point operations a second of a float32 matrix product in NumPy, at its best."""
    a = np.random.default_rng(0).normal(size=(n, n)).astype("float32")
    return 2 * n**3 / min(seconds(lambda: a @ a) for _ in range(10))


def matrix_product_operations(shape, num_blocks=16):
    """Of one training step of RecurrentBlock(WIDTH) as the first layer of a model.

    A product costs as much again for the gradient of its weights, and as much again for the
    gradient of its input, which the two maps at the entry do not need.
    """
    tokens = shape[0] * shape[1]
    dense, gate = 2 * tokens * WIDTH * WIDTH, 2 * tokens * WIDTH * WIDTH // num_blocks
    entries, out, gates = 2 * 2 * dense, 3 * dense, 2 * 3 * gate
    return entries + out + gates


def main():
    rows = [
        {
            "backend": keras.backend.backend(),
            "shape": shape,
            "operations": matrix_product_operations(shape),
            **medians({name: training_step(layer, shape) for name, layer in layers().items()}),
        }
        for shape in SHAPES
    ]
    print(json.dumps({"rows": rows, "rate": matrix_product_rate()}))


if __name__ == "__main__":
    main()
