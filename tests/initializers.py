"""Keras's random initializers, drawing from NumPy.

JAX and TensorFlow would compile a program for each shape of a weight. The distributions are
Keras's; that initializers draw from them is tested on torch, where Keras draws by itself.
"""

import itertools
import weakref

import keras
import numpy as np
from keras.src.initializers import random_initializers

CALLS = weakref.WeakKeyDictionary()  # of each seed generator, which gives other numbers each time


def generator(seed):
    if isinstance(seed, keras.random.SeedGenerator):
        calls = CALLS.setdefault(seed, itertools.count())
        return np.random.default_rng([seed._initial_seed, next(calls)])
    return np.random.default_rng(seed)


def tensor(array, dtype):
    return keras.ops.convert_to_tensor(array.astype("float32"), dtype or keras.config.floatx())


class Draws:
    """The functions of `keras.random` that initializers call."""

    SeedGenerator = keras.random.SeedGenerator
    make_default_seed = staticmethod(random_initializers.random.make_default_seed)

    @staticmethod
    def normal(shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
        return tensor(generator(seed).normal(mean, stddev, shape), dtype)

    @staticmethod
    def uniform(shape, minval=0.0, maxval=1.0, dtype=None, seed=None):
        return tensor(generator(seed).uniform(minval, maxval, shape), dtype)

    @staticmethod
    def truncated_normal(shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
        rng = generator(seed)
        drawn = rng.normal(size=shape)
        while (outside := np.abs(drawn) > 2).any():
            drawn[outside] = rng.normal(size=outside.sum())
        return tensor(mean + stddev * drawn, dtype)


def draw_from_numpy():
    random_initializers.random = Draws
