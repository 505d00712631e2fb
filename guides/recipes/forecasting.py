"""Forecast a time series with a recurrent layer, one step after another.

    KERAS_BACKEND=jax python guides/recipes/forecasting.py

A network reads a series sample by sample, and says after each what the next one will be. To
forecast further, its own answer is given to it as the next sample. What it knows of the past is a
state of fixed size: the past is read once, at once, and each further hour costs one step, whatever
came before. It takes minutes on two CPU cores.

[layers.py](../layers.py) compares these layers with GRU, LSTM and attention on a harder series.
"""

import argparse
import os

# Keras reads this once, when it is imported. "torch" and "tensorflow" do as well.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

from keras_recurrent.layers import RecurrentBlock, RMSNorm

DAY, WEEK = 24, 7 * 24


# --- 1. Data: hours of a demand with days, weeks and noise, as of electricity or a shop ---


def series(rows, length, seed):
    """float32 [rows, length, 1]: each row has rhythms of its own, and some noise."""
    rng = np.random.default_rng(seed)
    hours = np.arange(length) + rng.integers(0, WEEK, (rows, 1))
    day = rng.uniform(0.5, 1.5, (rows, 1)) * np.sin(2 * np.pi * hours / DAY)
    weekend = np.where(hours % WEEK >= 5 * DAY, rng.uniform(-1.5, -0.5, (rows, 1)), 0.0)
    noise = rng.normal(scale=0.1, size=(rows, length))
    return (day + weekend + noise)[..., None].astype("float32")


# --- 2. Model: two recurrent blocks, which take a state and give the one after ---


class Forecaster(keras.Model):
    """The next sample after each sample."""

    def __init__(self, width, num_layers=2):
        super().__init__()
        self.embed = keras.layers.Dense(width)
        self.norms = [RMSNorm() for _ in range(num_layers)]
        self.blocks = [RecurrentBlock(width) for _ in range(num_layers)]
        self.head = keras.layers.Dense(1)

    def call(self, x):
        return self.advance(x)[0]

    def advance(self, x, states=None):
        """Outputs `[B, T, 1]` for samples `[B, T, 1]`, and the states after the last of them.

        Samples may come in any pieces: with the states after one piece the next goes on as if both
        had come at once.
        """
        y, after = self.embed(x), []
        for i, (norm, block) in enumerate(zip(self.norms, self.blocks, strict=True)):
            state = None if states is None else states[i]
            mixed, state = block(norm(y), initial_state=state, return_state=True)
            y = y + mixed
            after.append(state)
        return x + self.head(y), after  # what changes from a sample to the next


def train(width, rows, epochs):
    x = series(rows, 3 * WEEK, seed=0)
    model = Forecaster(width)
    steps = epochs * -(-rows // 16)
    rate = keras.optimizers.schedules.CosineDecay(0.01, steps)
    model.compile(keras.optimizers.Adam(rate), "mse")
    model.fit(x[:, :-1], x[:, 1:], batch_size=16, epochs=epochs, verbose=2)
    return model


# --- 3. Forecast: the past at once, then hour by hour with a kept state ---


def forecast(model, past, hours):
    """float32 [rows, hours, 1], what comes after `past`."""
    outputs, states = model.advance(keras.ops.convert_to_tensor(past))
    found = [outputs[:, -1:]]
    for _ in range(hours - 1):
        sample, states = model.advance(found[-1], states)
        found.append(sample)
    return np.concatenate([keras.ops.convert_to_numpy(sample) for sample in found], axis=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--rows", type=int, default=256, help="series to learn")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--hours", type=int, default=2 * DAY, help="to forecast")
    arguments = parser.parse_args()
    if not 1 <= arguments.hours <= WEEK:
        parser.error("--hours must be from 1 to 168, the week that is tested on")
    keras.utils.set_random_seed(0)
    model = train(arguments.width, arguments.rows, arguments.epochs)

    x = series(64, 3 * WEEK, seed=1)  # other rows than those that were learned
    past, future = x[:, : 2 * WEEK], x[:, 2 * WEEK :][:, : arguments.hours]
    guesses = {
        "the model": forecast(model, past, arguments.hours),
        "the same hour a week ago": past[:, WEEK:][:, : arguments.hours],
        "the last sample again": np.broadcast_to(past[:, -1:], future.shape),
    }
    print(f"Mean absolute error of {arguments.hours} hours; the noise alone is 0.08:")
    for name, guess in guesses.items():
        print(f"  {name}: {np.abs(guess - future).mean():.3f}")


if __name__ == "__main__":
    main()
