"""Generation for one batch of prompts, by the decoding loops of the backend."""

from typing import Any

import keras
import numpy as np

from keras_recurrent.generation.beam_sampler import BeamSampler
from keras_recurrent.generation.beam_search import Hypotheses
from keras_recurrent.generation.lengths import cache_max_length

__all__ = ["Loops", "generate"]

Loops: Any
if keras.config.backend() == "torch":
    from keras_recurrent.generation.torch.loop import Loop as Loops
else:
    from keras_recurrent.generation.xla_programs import Programs as Loops


def generate(model, loops, request, cache, keep):
    """Returns the `Result` of a `Request`.

    Args:
        model: the language model.
        loops: its `Loops`.
        request, cache, keep: as in `torch.loop.Loop.generate`.
    """
    if not isinstance(model.sampler, BeamSampler):
        return loops.generate(request, cache, keep)
    request = request._replace(stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids)))
    batch_size, length = request.token_ids.shape
    if request.free_length.any():
        found = loops.search(request, model.sampler, cache)
    else:
        size = batch_size, 1
        found = Hypotheses(np.zeros((*size, 0), "int32"), np.zeros(size, int), np.zeros(size))
    result = request.result(found.tokens[:, 0], found.counts[:, 0])
    if keep:
        max_length = cache_max_length(model, length, keep) if cache is None else None
        cache = loops.prefill(result.token_ids, result.lengths - 1, cache, max_length)
        result = result._replace(cache=cache)
    return result._replace(hypotheses=found if model.sampler.return_all_beams else None)
