"""The choice of the next token of each sequence, from logits and `SamplingParams`.

`Sampling` prepares arguments and random numbers of one call on the host. `next_tokens` chooses
tokens on the device, in the programs of all backends. A program depends only on the `Features`.
"""

import random
import threading
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.devices.jax_layouts import apply_layout
from keras_recurrent.generation.beam_sampler import BeamSampler
from keras_recurrent.generation.samplers import as_sampling_params
from keras_recurrent.generation.sampling_params import SamplingParams

MIN_CANDIDATES, MAX_CANDIDATES = 8, 64
ALL_PER_SORTED = 8  # with fewer tokens per sorted token, sorting these by id takes longer
STOPS_PER_STEP = 4  # stop tokens are padded to a multiple, so that others take the same program
# Weights of candidates are integers up to this number: their sums are exact in any order, so that
# the options of other sequences do not change a token.
LARGEST_WEIGHT = 2**24
ROUNDING = 1e-6  # of sums of probabilities in float32, relative
LARGEST_UNIFORM = np.float32(1 - 2**-23)  # times a sum, it is below this sum in float32

# Held from reading the state of a sampler's generator to assigning the next one.
_state_lock = threading.Lock()


class Features(NamedTuple):
    """Options in use, which a program depends on; the defaults choose the most probable token.

    Attributes:
        is_random: boolean, a sequence has a temperature above 0.
        has_greedy: boolean, another sequence has a temperature of 0.
        num_candidates: integer, number of most probable tokens among which sequences with a `top_k`
            of up to `MAX_CANDIDATES` draw. 0: there is no such sequence.
        has_others: boolean, another sequence with a temperature above 0 draws among all tokens.
        num_sorted: integer, number of most probable tokens that are sorted to find those that the
            latter sequences keep. 0: they keep all.
        has_top_p, has_min_p, has_penalties, has_bias, has_minimum: booleans.
        uses_counts: boolean, a penalty is one of presence or frequency.
        num_logprobs: integer, number of most probable tokens whose log probabilities are returned.
            None: no log probabilities.
    """

    is_random: bool = False
    has_greedy: bool = False
    num_candidates: int = 0
    has_others: bool = False
    num_sorted: int = 0
    has_top_p: bool = False
    has_min_p: bool = False
    has_penalties: bool = False
    uses_counts: bool = False
    has_bias: bool = False
    has_minimum: bool = False
    num_logprobs: int | None = None


class Logprobs(NamedTuple):
    """Log probabilities of the model, before all options.

    Attributes:
        chosen: float32 `[B]`, of the sampled tokens.
        top: float32 `[B, N]`, of the N most probable tokens, in descending order.
        token_ids: int32 `[B, N]`, these tokens.
    """

    chosen: Any
    top: Any
    token_ids: Any


class Sampling:
    """Options and random numbers of one call, by which its tokens are chosen.

    Args:
        params: a list of `SamplingParams`, one for each sequence.
        seeds: a list of `numpy.random.SeedSequence`, one for each sequence.
        vocabulary_size: integer.
        tokens: a list of integer arrays, the tokens of each sequence so far.

    Attributes:
        batch_size: integer.
        params: a list of the `SamplingParams` of each sequence.
        features: the `Features`.
        arguments: `{name: array [B] or [B, vocabulary_size]}`, those that the features need.
    """

    def __init__(self, params, seeds, vocabulary_size, tokens):
        self.batch_size, self.params = len(tokens), params
        self.arguments, self._generators = {}, []
        self.features = features = features_of(params, vocabulary_size)
        for name in argument_names(features):
            if name in ("in_prompt", "logit_bias"):
                continue
            values = [getattr(p, name) for p in params]
            if name == "top_k":
                values = [min(v, vocabulary_size) if v > 0 else vocabulary_size for v in values]
            integers = name in ("top_k", "min_new_tokens")
            self.arguments[name] = np.array(values, "int32" if integers else "float32")
        if features.has_bias:
            bias = np.zeros((len(params), vocabulary_size), "float32")
            for row, p in zip(bias, params, strict=True):
                for token, number in (p.logit_bias or {}).items():
                    row[token] = number
            self.arguments["logit_bias"] = bias
        if features.has_penalties:
            known = np.zeros((len(params), vocabulary_size), bool)
            for row, ids in zip(known, tokens, strict=True):
                row[ids] = True
            self.arguments["in_prompt"] = known
        if features.is_random:
            self._generators = [np.random.Generator(np.random.Philox(seed)) for seed in seeds]

    def uniform(self, count):
        """Returns the next `count` random numbers of each sequence, float32 `[B, count]`."""
        numbers = [generator.random(count, "float32") for generator in self._generators]
        return np.minimum(numbers, LARGEST_UNIFORM)


def make_sampling(model, params, tokens):
    """Returns the `Sampling` of one call.

    Args:
        model: the language model.
        params: one `SamplingParams`, or a list of one for each sequence. None: the sampler of the
            model.
        tokens: a list of integer arrays, the tokens of each sequence so far.

    Raises:
        ValueError: `params` are of another type or number, an id or number exceeds the vocabulary,
            or the sampler of the model is beam search.
    """
    size, batch_size = model.backbone.vocabulary_size, len(tokens)
    if params is None:
        params = [as_sampling_params(model.sampler)] * batch_size
        return Sampling(params, _seeds(model.sampler, tokens), size, tokens)
    params = _as_list(params, batch_size)
    for p in params:
        p.check_vocabulary(size)
    if isinstance(model.sampler, BeamSampler):
        raise ValueError(
            "`sampling` cannot be combined with the sampler BeamSampler. Compile with 'greedy', "
            "'top_k', 'top_p' or 'random', which `sampling` replaces."
        )
    seeds = [random.getrandbits(64) if p.seed is None else p.seed for p in params]
    seeds = list(map(np.random.SeedSequence, seeds))
    return Sampling(params, seeds, size, tokens)


def _as_list(params, batch_size):
    if isinstance(params, SamplingParams):
        return [params] * batch_size
    params = list(params) if isinstance(params, (list, tuple)) else params
    if not isinstance(params, list) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(
            "`sampling` must be a `SamplingParams`, or a list of one for each prompt; got "
            f"{params!r}."
        )
    if len(params) != batch_size:
        raise ValueError(
            f"`sampling` must have one `SamplingParams` for each of the {batch_size} prompts; got "
            f"{len(params)}."
        )
    return params


def _seeds(sampler, tokens):
    """Returns a seed for each sequence, and advances the generator of a sampler of KerasHub."""
    generator = getattr(sampler, "seed_generator", None)
    if generator is None:
        return []
    with _state_lock:
        seed, count = (int(number) for number in ops.convert_to_numpy(generator.state.value))
        generator.state.assign([seed, count + 1])
    return [np.random.SeedSequence([seed, count, row]) for row in range(len(tokens))]


def features_of(params, vocabulary_size):
    """Returns the `Features` of a list of `SamplingParams`, one for each sequence."""
    sampled = [p for p in params if not p.is_greedy]
    limits = [p.top_k if p.top_k > 0 else vocabulary_size for p in sampled]
    few = [limit for limit in limits if limit <= MAX_CANDIDATES]
    others = [p for p, limit in zip(sampled, limits, strict=True) if limit > MAX_CANDIDATES]
    num_sorted = 0
    if any(p.top_p < 1 or 0 < p.top_k < vocabulary_size for p in others):
        num_sorted = min(_power_of_two(max(limits), 1), vocabulary_size)
    num_logprobs = max((p.logprobs for p in params if p.logprobs is not None), default=None)
    if num_logprobs:
        num_logprobs = min(_power_of_two(num_logprobs, 1), vocabulary_size)
    return Features(
        is_random=bool(sampled),
        has_greedy=0 < len(sampled) < len(params),
        num_candidates=min(_power_of_two(max(few), MIN_CANDIDATES), vocabulary_size) if few else 0,
        has_others=bool(others),
        num_sorted=num_sorted,
        has_top_p=any(p.top_p < 1 for p in sampled),
        has_min_p=any(p.min_p for p in sampled),
        has_penalties=any(p.has_penalties for p in params),
        uses_counts=any(p.presence_penalty or p.frequency_penalty for p in params),
        has_bias=any(p.logit_bias for p in params),
        has_minimum=any(p.min_new_tokens for p in params),
        num_logprobs=num_logprobs,
    )


def argument_names(features):
    """Returns the sorted names of the `Sampling.arguments` that `Features` need."""
    names = {
        "temperature": features.is_random,
        "min_p": features.has_min_p,
        "top_k": features.num_candidates or features.num_sorted,
        "top_p": features.has_top_p,
        "repetition_penalty": features.has_penalties,
        "in_prompt": features.has_penalties,
        "presence_penalty": features.uses_counts,
        "frequency_penalty": features.uses_counts,
        "min_new_tokens": features.has_minimum,
        "logit_bias": features.has_bias,
    }
    return sorted(name for name, is_used in names.items() if is_used)


def _power_of_two(number, least):
    return max(least, 1 << (number - 1).bit_length())


def next_tokens(features, logits, stops, count, uniform, counts, arguments):
    """Chooses the next token of each sequence.

    Args:
        features: the `Features`.
        logits: `[B, vocabulary_size]`.
        stops: int32 `[S]` or `[B, S]`, the stop tokens, of all or of each sequence.
        count: int32 `[B]`, number of tokens generated before.
        uniform: float32 `[B]`, random numbers in [0, 1). None: no sequence is random.
        counts: int32 `[B, vocabulary_size]`, how often each token was generated, with penalties;
            else it is returned as it is.
        arguments: as in `Sampling`.

    Returns:
        `(tokens, counts, logprobs)`: int32 `[B]`, the new counts, and the `Logprobs` or ().
    """
    if features == Features():
        return ops.argmax(logits, axis=-1), counts, ()
    model_logits = logits
    ids = ops.arange(logits.shape[-1], dtype="int32")
    if features.has_bias or features.has_minimum or features.has_penalties:
        logits = ops.cast(logits, "float32")
    if features.has_bias:
        logits = logits + arguments["logit_bias"]
    if features.has_minimum:
        is_stop = ops.any(ops.equal(ids, stops[..., None]), axis=-2)
        is_early = (count < arguments["min_new_tokens"])[:, None]
        logits = ops.where(ops.logical_and(is_stop, is_early), -np.inf, logits)
    if features.has_penalties:
        logits = _penalize(features, logits, counts, arguments)
    if features.is_random:
        token = _draw(features, logits, uniform, arguments)
    else:
        token = ops.cast(ops.argmax(logits, axis=-1), "int32")
    if features.has_penalties:
        counts = counts + ops.cast(ops.equal(ids, token[:, None]), "int32")
    logprobs: Any = ()
    if features.num_logprobs is not None:
        logprobs = _log_probabilities(model_logits, token, features.num_logprobs)
    return token, counts, logprobs


def empty_logprobs(num_logprobs, size):
    """Returns zeros for the `Logprobs` of `size` tokens, a tuple of integers, or ()."""
    if num_logprobs is None:
        return ()
    top = *size, num_logprobs
    return Logprobs(ops.zeros(size), ops.zeros(top), ops.zeros(top, "int32"))


def _penalize(features, logits, counts, arguments):
    generated = ops.greater(counts, 0)
    known = ops.logical_or(arguments["in_prompt"], generated)
    repetition = arguments["repetition_penalty"][:, None]
    factor = ops.where(ops.greater(logits, 0), 1 / repetition, repetition)
    logits = ops.where(known, logits * factor, logits)
    if not features.uses_counts:
        return logits
    presence, frequency = (arguments[f"{name}_penalty"] for name in ("presence", "frequency"))
    counts, generated = ops.cast(counts, "float32"), ops.cast(generated, "float32")
    return logits - frequency[:, None] * counts - presence[:, None] * generated


def _draw(features, logits, uniform, arguments):
    temperature = arguments["temperature"]
    divisor = ops.where(ops.greater(temperature, 0), temperature, 1.0)[:, None]
    token = None
    if features.has_others:
        token = _draw_among_all(features, logits, divisor, uniform, arguments)
    if features.num_candidates:
        few = _draw_among_candidates(features, logits, divisor, uniform, arguments)
        is_few = arguments["top_k"] <= MAX_CANDIDATES
        token = few if token is None else ops.where(is_few, few, token)
    if not features.has_greedy:
        return token
    best = ops.cast(ops.argmax(logits, axis=-1), "int32")
    return ops.where(ops.greater(temperature, 0), token, best)


# Both functions below assign intervals of random numbers to tokens in the order of their ids.


def _draw_among_candidates(features, logits, divisor, uniform, arguments):
    """Draws tokens [B] of sequences with a `top_k` of up to `MAX_CANDIDATES`."""
    options = {"x": logits, "count": features.num_candidates}
    candidates, ids, _ = dispatch.run("top_logits", options)
    scaled = candidates / divisor
    below_best = scaled - scaled[:, :1]
    rank = ops.arange(features.num_candidates, dtype="int32")
    kept = rank < arguments["top_k"][:, None]
    if features.has_min_p:
        kept = ops.logical_and(kept, below_best >= ops.log(arguments["min_p"][:, None]))
    weights = ops.where(kept, ops.exp(below_best), 0.0)
    weights = ops.cast(ops.round(weights * LARGEST_WEIGHT), "int32")
    if features.has_top_p:
        top_p = arguments["top_p"][:, None]
        more_probable = ops.cast(ops.cumsum(weights, axis=-1) - weights, "float32")
        total = ops.cast(ops.sum(weights, axis=-1, keepdims=True), "float32")
        dropped = ops.logical_and(top_p < 1, more_probable >= top_p * total)
        weights = ops.where(dropped, 0, weights)
    is_counted = ops.cast(ids[:, None, :] <= ids[:, :, None], "int32")
    cumulative = ops.sum(weights[:, None, :] * is_counted, axis=-1)
    total = ops.cast(ops.sum(weights, axis=-1), "float32")
    is_above = ops.cast(cumulative, "float32") > (uniform * total)[:, None]
    # Logits of NaN have no interval; the last token is one that the model knows.
    return ops.min(ops.where(is_above, ids, logits.shape[-1] - 1), axis=-1)


def _draw_among_all(features, logits, divisor, uniform, arguments):
    """Draws tokens [B] of the other sequences."""
    logits = apply_layout(logits, "sampled_logits")  # gathered once, not by several operations
    scaled = ops.cast(logits, "float32") / divisor
    if features.has_min_p:
        lowest = ops.max(scaled, axis=-1, keepdims=True) + ops.log(arguments["min_p"][:, None])
        scaled = ops.where(ops.less(scaled, lowest), -np.inf, scaled)
    if not features.num_sorted:
        return _index_of(ops.softmax(scaled, axis=-1), uniform)
    if features.num_sorted <= scaled.shape[-1] // ALL_PER_SORTED:
        options = {"x": scaled, "count": features.num_sorted}
        values, ids, _ = dispatch.run("top_logits", options)
        kept, order = _kept(features, values, arguments), ops.argsort(ids, axis=-1)
        weights = ops.softmax(ops.where(kept, values, -np.inf), axis=-1)
        index = _index_of(ops.take_along_axis(weights, order, axis=-1), uniform)
        rank = ops.take_along_axis(order, index[:, None], axis=-1)
        return ops.take_along_axis(ids, rank, axis=-1)[:, 0]
    values, _ = ops.top_k(scaled, features.num_sorted, sorted=True)
    kept = _kept(features, values, arguments)
    lowest = ops.min(ops.where(kept, values, np.inf), axis=-1, keepdims=True)
    # Of the tokens with the lowest logit that is kept, those of the first ids are kept.
    num_equal = ops.sum(ops.cast(kept, "int32"), axis=-1, keepdims=True)
    num_equal = num_equal - ops.sum(ops.cast(values > lowest, "int32"), axis=-1, keepdims=True)
    is_equal = ops.equal(scaled, lowest)
    is_first = ops.cumsum(ops.cast(is_equal, "int32"), axis=-1) <= num_equal
    kept = ops.logical_or(scaled > lowest, ops.logical_and(is_equal, is_first))
    return _index_of(ops.softmax(ops.where(kept, scaled, -np.inf), axis=-1), uniform)


def _index_of(probabilities, uniform):
    """Returns the index `[B]` whose interval has the random number."""
    cumulative = ops.cumsum(probabilities, axis=-1)
    reached = ops.less_equal(cumulative, uniform[:, None] * cumulative[:, -1:])
    return ops.sum(ops.cast(reached, "int32"), axis=-1)


def _kept(features, values, arguments):
    """Returns True for those of the sorted logits that `top_k` and `top_p` keep, the first ones."""
    kept = ops.arange(features.num_sorted, dtype="int32") < arguments["top_k"][:, None]
    if features.has_top_p:
        top_p = arguments["top_p"][:, None]
        probabilities = ops.softmax(ops.where(kept, values, -np.inf), axis=-1)
        more_probable = ops.cumsum(probabilities, axis=-1) - probabilities
        reached = more_probable >= top_p * (1 - ROUNDING)
        dropped = ops.logical_and(top_p < 1, reached)
        kept = ops.logical_and(kept, ops.logical_not(dropped))
    return kept


def _log_probabilities(logits, token, number):
    options = {"x": logits, "count": max(number, 1)}
    top, ids, log_sum = dispatch.run("top_logits", options)
    chosen = ops.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    chosen = ops.cast(chosen, "float32") - log_sum
    return Logprobs(chosen, top[:, :number] - log_sum[:, None], ids[:, :number])
