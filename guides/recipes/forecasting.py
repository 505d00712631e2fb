"""Forecast a time series with a recurrent layer, step by step.

    KERAS_BACKEND=jax python guides/recipes/forecasting.py

A network reads a series sample by sample, together with calendar features of the following hour
(time of day, weekend), and predicts the next sample. For longer forecasts, its prediction becomes
its next input. The past is processed once, in parallel; each further hour then costs one step with
a state of fixed size. The script takes minutes on two CPU cores.

[layers.py](../layers.py) compares these layers with GRU, LSTM and attention on a harder series.
"""

import argparse
import os

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

from keras_recurrent.layers import RecurrentBlock, RMSNorm

DAY, WEEK = 24, 7 * 24


# --- 1. Data: hourly demand with daily and weekly patterns and noise ---


def series(rows, length, seed):
    """Returns samples and calendar, float32 [rows, length, 1] and [rows, length, 3].

    Each series has its own strength of the daily and weekend patterns, which must be inferred from
    its past, and starts at a random hour of the week.
    """
    rng = np.random.default_rng(seed)
    hours = np.arange(length) + rng.integers(0, WEEK, (rows, 1))
    angle, weekend = 2 * np.pi * hours / DAY, hours % WEEK >= 5 * DAY
    day = rng.uniform(0.5, 1.5, (rows, 1)) * np.sin(angle)
    samples = day + weekend * rng.uniform(-1.5, -0.5, (rows, 1))
    samples += rng.normal(scale=0.1, size=(rows, length))
    calendar = np.stack([np.sin(angle), np.cos(angle), weekend], axis=-1)
    return samples[..., None].astype("float32"), calendar.astype("float32")


def inputs_of(samples, calendar):
    """Concatenates each sample with the calendar of the following hour."""
    return np.concatenate([samples[:, : calendar.shape[1] - 1], calendar[:, 1:]], axis=-1)


# --- 2. Model: two recurrent blocks with explicit states ---


class Forecaster(keras.Model):
    """Predicts the next sample after each sample."""

    def __init__(self, width, num_layers=2):
        super().__init__()
        self.embed = keras.layers.Dense(width, "gelu")
        self.norms = [RMSNorm() for _ in range(num_layers)]
        self.blocks = [RecurrentBlock(width) for _ in range(num_layers)]
        self.head = keras.layers.Dense(1)

    def call(self, x):
        return self.advance(x)[0]

    def advance(self, x, states=None):
        """Returns predictions `[B, T, 1]` for inputs `[B, T, 4]`, and the states after them.

        A sequence may be processed in several calls, each with the states of the previous one.
        """
        y, after = self.embed(x), []
        for i, (norm, block) in enumerate(zip(self.norms, self.blocks, strict=True)):
            state = None if states is None else states[i]
            mixed, state = block(norm(y), initial_state=state, return_state=True)
            y = y + mixed
            after.append(state)
        return self.head(y), after


def train(width, rows, epochs):
    samples, calendar = series(rows, 3 * WEEK, seed=0)
    model = Forecaster(width)
    rate = keras.optimizers.schedules.CosineDecay(0.005, epochs * -(-rows // 16))
    model.compile(keras.optimizers.Adam(rate), "mse")
    x, y = inputs_of(samples, calendar), samples[:, 1:]
    model.fit(x, y, batch_size=16, epochs=epochs, verbose=2)
    return model


# --- 3. Forecast: the past in one call, then hour by hour ---


def forecast(model, past, calendar, hours):
    """Returns forecasts float32 [rows, hours, 1] after `past`; `calendar` covers both."""
    end = past.shape[1]
    outputs, states = model.advance(inputs_of(past, calendar[:, : end + 1]))
    found = [keras.ops.convert_to_numpy(outputs[:, -1:])]
    for hour in range(end + 1, end + hours):
        sample, states = model.advance(
            inputs_of(found[-1], calendar[:, hour - 1 : hour + 1]), states
        )
        found.append(keras.ops.convert_to_numpy(sample))
    return np.concatenate(found, axis=1)


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

    # Series that were not used in training.
    samples, calendar = series(64, 3 * WEEK, seed=1)
    past, future = samples[:, : 2 * WEEK], samples[:, 2 * WEEK :][:, : arguments.hours]
    guesses = {
        "the model": forecast(model, past, calendar, arguments.hours),
        "the same hour a week ago": past[:, WEEK:][:, : arguments.hours],
        "the last sample again": np.broadcast_to(past[:, -1:], future.shape),
    }
    print(f"Mean absolute error of {arguments.hours} hours; the noise alone is 0.08:")
    for name, guess in guesses.items():
        print(f"  {name}: {np.abs(guess - future).mean():.3f}")


if __name__ == "__main__":
    main()
