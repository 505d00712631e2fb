"""Compares a training step of RecurrentBlock with Keras's GRU and LSTM, on one backend.

Prints JSON; `python benchmarks/cpu.py` runs it for every backend and makes a table.
"""

import json
import statistics
import time

import keras
import numpy as np

from keras_recurrent.layers import RecurrentBlock

WIDTH = 256
SHAPES = [(8, 512, WIDTH), (1, 4096, WIDTH)]
SECONDS, LEAST, MOST = 6, 5, 50  # time per layer, and the least and most repeats


def layers():
    return {
        "RecurrentBlock": RecurrentBlock(WIDTH),
        "GRU": keras.layers.GRU(WIDTH, return_sequences=True),
        "LSTM": keras.layers.LSTM(WIDTH, return_sequences=True),
    }


def training_step(layer, shape):
    """Returns a function without arguments: forward, backward and update, compiled by Keras."""
    model = keras.Sequential([keras.Input(shape[1:]), layer])
    model.compile(optimizer="sgd", loss="mse")
    x, y = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    return lambda: model.train_on_batch(x, y)


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def medians(calls, budget=SECONDS, least=LEAST):
    """Returns the median time of each call. Calls take turns, so that noise affects all.

    budget: the time for each call, in seconds; least: the least number of repeats.
    """
    rounds = {}
    for name, call in calls.items():
        seconds(call)  # traces and compiles
        rounds[name] = min(MOST, max(least, round(budget / seconds(call))))
    times = {name: [] for name in calls}
    for i in range(max(rounds.values())):
        for name, call in calls.items():
            if i < rounds[name]:
                times[name].append(seconds(call))
    return {name: statistics.median(t) for name, t in times.items()}


def matrix_product_rate(n=1024):
    """Measures the best FLOP/s of a float32 matrix product in NumPy."""
    a = np.random.default_rng(0).normal(size=(n, n)).astype("float32")
    return 2 * n**3 / min(seconds(lambda: a @ a) for _ in range(10))


def matrix_product_operations(shape, num_blocks=16):
    """Counts operations of a training step of RecurrentBlock(WIDTH) as a model's first layer.

    A product costs as much again for the gradient of its weights, and as much again for the
    gradient of its input, which the two input projections do not need.
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
