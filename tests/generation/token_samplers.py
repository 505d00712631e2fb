"""Sampling without a model, and the sampler of decoding steps on torch."""

import keras_hub
import numpy as np

from keras_recurrent.generation.samplers import resolve_sampling
from keras_recurrent.generation.sampling_call import Sampling


def resolved(params, batch_size, vocabulary_size):
    """The `SamplingParams` and seeds of sequences.

    params: a `SamplingParams`, a list of them, or a sampler of KerasHub or a user.
    """

    class Model:  # as far as the choice of tokens sees it
        sampler = keras_hub.samplers.GreedySampler()

        class backbone:
            pass

    Model.backbone.vocabulary_size = vocabulary_size
    if isinstance(params, keras_hub.samplers.Sampler):
        Model.sampler, params = params, None
    return resolve_sampling(Model, params, batch_size)


def token_sampler(params, batch_size=2, vocabulary_size=50, stops=(), device="cpu"):
    """A `TokenSampler` of torch; `params` as for `resolved`."""
    import torch

    from keras_recurrent.generation.torch.sampling import TokenSampler

    stops = torch.tensor(stops, dtype=torch.int32, device=device)
    params, seeds = resolved(params, batch_size, vocabulary_size)
    sampling = Sampling(params, seeds, vocabulary_size, [np.array([1])] * batch_size)
    return TokenSampler(sampling, stops, vocabulary_size)
