"""`Sampling`, the options of one call for loops that have not adopted `option_arrays`."""

import numpy as np

from keras_recurrent.generation.samplers import (
    make_generator,
    resolve_sampling,
    uniform_numbers,
)
from keras_recurrent.generation.sampling import features_of, option_arrays


class Sampling:
    """Options and random numbers of one call."""

    def __init__(self, params, seeds, vocabulary_size, tokens):
        self.batch_size, self.params = len(tokens), params
        self.features = features_of(params, vocabulary_size)
        self.arguments = option_arrays(params, tokens, vocabulary_size)
        self._generators = list(map(make_generator, seeds))

    def uniform(self, count):
        return np.stack([uniform_numbers(generator, count) for generator in self._generators])


def make_sampling(model, params, tokens):
    params, seeds = resolve_sampling(model, params, len(tokens))
    return Sampling(params, seeds, model.backbone.vocabulary_size, tokens)
