"""Uptraining: training after a conversion.  Ainslie et al. 2023, arXiv:2305.13245, §2.1."""

import math
from typing import Any, NamedTuple

import keras


class Uptraining(NamedTuple):
    """Arguments of `compile` and `fit` for a fraction of the original training.

    Attributes:
        steps: int, batches.
        learning_rate: a float or a `keras.optimizers.schedules.LearningRateSchedule`.
        callbacks: a list for `fit`, which ends training after these steps, for any `epochs`.
    """

    steps: int
    learning_rate: Any
    callbacks: list


def uptraining(original_steps, learning_rate, fraction=0.05, tail=False):
    """Returns steps, learning rate and callbacks to continue training of a converted model.

    The recipe is that of the original training, for α = `fraction` of its S steps:

        steps = ⌈α S⌉;   rate(t) = rate_original(S) or, with `tail`, rate_original(S − steps + t)

    Source: Ainslie et al. 2023, arXiv:2305.13245, §2.1 and §3.1 (α = 0.05).

    Args:
        original_steps: int, S, the number of training steps of the multi-head model.
        learning_rate: the learning rate of that training, a float or a `LearningRateSchedule`.
        fraction: float, α, above 0, at most 1.
        tail: bool. False: the rate is the final rate of the schedule. True: the last part of the
            original schedule is repeated.

    Returns:
        An `Uptraining`. Its callbacks count steps from the start of one `fit`: make a new
        `Uptraining` for each `fit`.

    Raises:
        ValueError: a number is out of range, or a schedule ends at a rate of 0 without `tail`.

    Example:

    >>> from keras_recurrent.conversion import uptraining
    >>> plan = uptraining(original_steps=10_000, learning_rate=1e-3)
    >>> plan.steps, plan.learning_rate
    (500, 0.001)

    With it, `model.compile(keras.optimizers.Adam(plan.learning_rate), ...)` and
    `model.fit(data, epochs=100, callbacks=plan.callbacks)` train for 500 steps.
    """
    if not isinstance(original_steps, int) or original_steps < 1:
        raise ValueError(f"`original_steps` must be an integer above 0; got {original_steps!r}.")
    if not 0 < fraction <= 1:
        raise ValueError(f"`fraction` must be above 0 and at most 1; got {fraction!r}.")
    # Rounded, as 0.07 · 100 is 7.000000000000001.
    steps = max(1, math.ceil(round(fraction * original_steps, 6)))
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        if tail:
            learning_rate = ScheduleTail(learning_rate, original_steps - steps)
        else:
            learning_rate = float(learning_rate(original_steps))
            if learning_rate <= 0:
                raise ValueError(
                    "The schedule in `learning_rate` ends at a rate of 0, which trains nothing. "
                    "Set `tail=True`, or pass a number."
                )
    elif tail:
        raise ValueError(
            "`tail` repeats the last part of a schedule, but `learning_rate` is the number "
            f"{learning_rate!r}."
        )
    return Uptraining(steps, learning_rate, [StopAfter(steps)])


@keras.saving.register_keras_serializable(package="keras_recurrent")
class ScheduleTail(keras.optimizers.schedules.LearningRateSchedule):
    """Schedule that starts at a step of another: rate(t) = schedule(start + t)."""

    def __init__(self, schedule, start):
        self.schedule = schedule
        self.start = start

    def __call__(self, step):
        return self.schedule(step + self.start)

    def get_config(self):
        schedule = keras.optimizers.schedules.serialize(self.schedule)
        return {"schedule": schedule, "start": self.start}

    @classmethod
    def from_config(cls, config):
        schedule = keras.optimizers.schedules.deserialize(config["schedule"])
        return cls(schedule, config["start"])


class StopAfter(keras.callbacks.Callback):
    """Ends `fit` after a number of batches."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_begin(self, logs=None):
        self._taken = 0

    def on_train_batch_end(self, batch, logs=None):
        self._taken += 1
        if self._taken >= self.steps:
            self.model.stop_training = True
