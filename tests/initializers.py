"""Random initializers of Keras, drawing from NumPy.

On JAX and TensorFlow, each weight shape would compile a program. The distributions are unchanged;
tests on torch use Keras's own random functions.
"""

import itertools
import weakref

import keras
import numpy as np
from keras.src.initializers import random_initializers

# Seed generator → numbers of its draws; each draw uses a new stream.
DRAWS = weakref.WeakKeyDictionary()


def numpy_generator(seed):
    if isinstance(seed, keras.random.SeedGenerator):
        calls = DRAWS.setdefault(seed, itertools.count())
        return np.random.default_rng([seed._initial_seed, next(calls)])
    return np.random.default_rng(seed)


def to_tensor(array, dtype):
    return keras.ops.convert_to_tensor(array.astype("float32"), dtype or keras.config.floatx())


class NumPyRandom:
    """Replacement for `keras.random` in initializers."""

    SeedGenerator = keras.random.SeedGenerator
    make_default_seed = staticmethod(random_initializers.random.make_default_seed)

    @staticmethod
    def normal(shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
        return to_tensor(numpy_generator(seed).normal(mean, stddev, shape), dtype)

    @staticmethod
    def uniform(shape, minval=0.0, maxval=1.0, dtype=None, seed=None):
        return to_tensor(numpy_generator(seed).uniform(minval, maxval, shape), dtype)

    @staticmethod
    def truncated_normal(shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
        rng = numpy_generator(seed)
        drawn = rng.normal(size=shape)
        while (outside := np.abs(drawn) > 2).any():
            drawn[outside] = rng.normal(size=outside.sum())
        return to_tensor(mean + stddev * drawn, dtype)


def patch_initializers():
    random_initializers.random = NumPyRandom
