"""Initializers of decays."""

import math

import keras
from keras import ops

from keras_recurrent.backends.constants import DECAY_EXPONENT
from keras_recurrent.checks.arguments import check_number, is_finite_number
from keras_recurrent.checks.dtypes import accumulation_dtype


@keras.saving.register_keras_serializable(package="keras_recurrent")
class DecayLogit(keras.initializers.RandomUniform):
    """Samples Λ such that a = σ(Λ), raised to a power, is uniform between two bounds.

    ```
    u ~ U[minval, maxval)        a = u^(1/power)        Λ = log a - log(1 - a)
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.4) sample a^8 from [0.9, 0.999]; DeepMind's released
    code of RecurrentGemma samples a^2 from [0.9^2, 0.999^2], so that a is in [0.9, 0.999], uniform
    by area in the unit disk (Orvieto et al. 2023, arXiv:2303.06349). The first has a memory about
    eight times as long. Layers select them by `a_initializer="griffin"` and
    `a_initializer="recurrentgemma"`.

    1 - a is computed as -expm1(log(u) / power), which is accurate near a = 1, in float32 (float64
    for a float64 weight).

    Args:
        minval: float, the lower bound of a^power, above 0.
        maxval: float, the upper bound of a^power, below 1.
        power: float, above 0.
        seed: as in `keras.initializers.RandomUniform`.

    Raises:
        ValueError: 0 < minval <= maxval < 1 does not hold, or `power` is not above 0.

    Example:

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import DecayLogit

    a_logit = keras.ops.convert_to_numpy(DecayLogit(0.9, 0.999, power=8)(shape=(1000,)))
    a = 1 / (1 + np.exp(-a_logit))
    assert 0.899 < (a**8).min() and (a**8).max() < 0.9991
    ```
    """

    def __init__(self, minval=0.9, maxval=0.999, *, power=8.0, seed=None):
        bounds = is_finite_number(minval) and is_finite_number(maxval)
        if not bounds or not 0 < minval <= maxval < 1:
            raise ValueError(
                "`minval` and `maxval` bound a power of a decay, so 0 < minval <= maxval < 1 must "
                f"hold; got minval={minval!r}, maxval={maxval!r}."
            )
        check_number("power", power, above=0)
        super().__init__(minval, maxval, seed)
        self.power = power

    def __call__(self, shape, dtype=None):
        dtype = keras.backend.standardize_dtype(dtype)
        u = super().__call__(shape, dtype=accumulation_dtype(dtype))
        log_a = ops.log(u) / self.power
        return ops.cast(log_a - ops.log(-ops.expm1(log_a)), dtype)

    def get_config(self):
        return {**super().get_config(), "power": self.power}


def get_decay_initializer(identifier):
    """Returns the initializer of Λ for an `a_initializer` argument."""
    if identifier == "griffin":
        return DecayLogit(0.9, 0.999, power=8.0)
    if identifier == "recurrentgemma":
        return DecayLogit(0.9**2, 0.999**2, power=2.0)
    try:
        return keras.initializers.get(identifier)
    except ValueError as error:
        raise ValueError(
            '`a_initializer` must be "griffin", "recurrentgemma" or a Keras initializer of Λ, such '
            f"as keras_recurrent.layers.DecayLogit(0.9, 0.99); got {identifier!r}."
        ) from error


def clone_initializer(initializer):
    """Copies an initializer, because an instance returns equal values in every call."""
    if isinstance(initializer, keras.initializers.Initializer):
        return initializer.clone()
    return initializer


def decay_angle(shape, dtype=None):
    """Samples `theta` of `CGLRU`: 8 theta is uniform in [0, 2π)."""
    return keras.initializers.RandomUniform(0.0, 2 * math.pi / DECAY_EXPONENT)(shape, dtype)


def log_decay_rate(shape, dtype=None):
    """Samples `a_log` of `Mamba2`: the logarithm of a number uniform in [1, 16)."""
    return ops.log(keras.initializers.RandomUniform(1.0, 16.0)(shape, dtype))


def time_step_bias(shape, dtype=None):
    """Samples `dt_bias` of `Mamba2`: softplus(dt_bias) is log-uniform in [0.001, 0.1)."""
    log_dt = keras.initializers.RandomUniform(math.log(0.001), math.log(0.1))(shape, dtype)
    return ops.log(ops.expm1(ops.exp(log_dt)))
