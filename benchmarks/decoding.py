"""Times decoding, and computes a lower bound of the time of a step, for the other scripts.

The time of a step is the difference between two calls of `generate`. The roofline is the least time
that its bytes and operations can take (De et al. 2024, arXiv:2402.19427, appendix F) at the
measured rates of this device. The KV cache of global attention has the capacity that `generate`
allocates: 64, 256, 1,024 tokens and then powers of two.
"""

import functools
import math
import statistics
import time

import keras
import numpy as np
from keras import ops

from benchmarks.timing import random_tokens, seconds, seconds_between
from keras_recurrent.checks.dtypes import bytes_of
from keras_recurrent.layers import LocalAttention
from keras_recurrent.models import memory_sizes
from keras_recurrent.models.memory import get_backbone

PLACES = 4  # positions in a sequence; the roofline is their mean, as caches grow linearly


def random_prompts(model, batch, prompt, new):
    """Returns the inputs of `generate` for `new` tokens after `prompt` random ones."""
    token_ids = random_tokens(model.backbone.vocabulary_size, batch, prompt + new)
    mask = np.broadcast_to(np.arange(prompt + new) < prompt, token_ids.shape)
    return {"token_ids": token_ids * mask, "padding_mask": mask}


def prepare_call(model, batch, prompt, new):
    """Returns a call of `generate` for `random_prompts`."""
    inputs = random_prompts(model, batch, prompt, new)
    return lambda: ops.convert_to_numpy(model.generate(inputs, stop_token_ids=None)["token_ids"])


def prepare_baseline_call(model, batch, prompt, new):
    """Returns a function that calls `generate` of another torch library on random prompts."""
    import torch

    token_ids = random_tokens(model.config.vocab_size, batch, prompt)
    token_ids = torch.tensor(token_ids, device=model.device).long()
    model.generation_config.eos_token_id = None  # no sequence ends early
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    @torch.no_grad()
    def call():
        result = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), **options)
        if result.shape != (batch, prompt + new):
            raise SystemExit(f"{type(model).__name__} generated {tuple(result.shape)}")

    return call


def seconds_a_token(model, batch, tokens, prompt=0, few=1, clock=time.perf_counter):
    """Returns the time per decoding step of the batch.

    An empty prompt is a start token. After a prompt, the time of a call with few tokens is
    subtracted.
    """
    if not prompt:
        return seconds(prepare_call(model, batch, 1, tokens - 1), clock=clock) / (tokens - 1)
    return seconds_between(
        functools.partial(prepare_call, model, batch, prompt), few, tokens, clock
    )


def decoding_time(model, batch_size, length, *, bytes_per_second, flops_per_second):
    """Returns lower bounds of the seconds of a decoding step, for weights and for the cache.

    De et al. 2024 (arXiv:2402.19427, section 4.2 and appendix F): a step reads each weight and the
    cache of each sequence once, and takes two operations per weight and sequence, per number of a
    recurrent state, and per query head of a number of a key or value. Writes, norms, activations
    and an embedding that is not shared with the logits are not counted.

    Args:
        model: a language model, a backbone or the name of a preset, as in `memory_sizes`.
        batch_size, length: integers, sequences, and tokens of each before the step.
        bytes_per_second, flops_per_second: numbers, the rates of the device.
    """
    model, operations = get_backbone(model, None), 0
    weights, embedding = list(model.weights), model.token_embedding
    if not embedding.tie_weights:
        weights = [w for w in weights if w is not embedding.embeddings]
    for block in model.transformer_layers:
        mixer, state = block.temporal_block, block.own_initial_state(1, length)
        is_shared = isinstance(mixer, LocalAttention)
        uses = mixer.num_query_heads // mixer.num_key_value_heads if is_shared else 1
        operations += uses * sum(math.prod(array.shape) for array in keras.tree.flatten(state))
    return tuple(
        max(size / bytes_per_second, 2 * batch_size * count / flops_per_second)
        for size, count in (
            (sum(map(bytes_of, weights)), sum(math.prod(w.shape) for w in weights)),
            (memory_sizes(model, batch_size, length).cache, operations),
        )
    )


def least_seconds_a_token(model, batch, tokens, prompt=0, **rates):
    """Returns the roofline, the mean of `decoding_time` along the sequence."""
    places = prompt + tokens * (np.arange(PLACES) + 0.5) / PLACES
    times = (decoding_time(model, batch, max(1, int(place)), **rates) for place in places)
    return statistics.mean(map(sum, times))
