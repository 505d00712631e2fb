"""Choice of the next token of each sequence, from logits and `SamplingParams`.

`resolve_sampling` converts samplers of KerasHub, and `option_arrays` prepares arguments on the
host. `next_tokens` chooses tokens on the device, in the programs of all backends. A program depends
only on the `Features`.
"""

import operator
import threading
from typing import Any, NamedTuple

import keras_hub
import numpy as np
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.checks.arguments import is_finite_number, is_integer
from keras_recurrent.devices.jax_layouts import apply_layout
from keras_recurrent.generation.beam_search import BeamSampler
from keras_recurrent.generation.grammar import neutral_masks
from keras_recurrent.generation.sampling_params import SamplingParams, seed_sequence
from keras_recurrent.portable.argmax import exclude_tokens

MIN_CANDIDATES, MAX_CANDIDATES = 8, 64
ALL_PER_SORTED = 8  # with a smaller vocabulary per sorted token, sorting by id takes longer
STOPS_PER_STEP = 4  # stop tokens are padded to a multiple, so that several numbers share a program
# Weights of candidates are integers up to this number: their sums are exact in any order, so that
# the options of other sequences do not change a token.
LARGEST_WEIGHT = 2**24
ROUNDING = 1e-6  # relative error of sums of probabilities in float32

SAMPLERS = "'greedy', 'top_k', 'top_p', 'random' or 'beam'"
CUSTOM_LOOP = (
    "For another choice of tokens, write a loop over `call_with_cache`, which continues from "
    "`backbone.get_initial_state`."
)

GREEDY = (BeamSampler, keras_hub.samplers.GreedySampler)  # beam search does not sample
RANDOM = (
    keras_hub.samplers.RandomSampler,
    keras_hub.samplers.TopKSampler,
    keras_hub.samplers.TopPSampler,
)

# Held from reading the state of a sampler's generator to assigning the next one.
_state_lock = threading.Lock()

# {name of an option: (its function, names of the function's inputs)}, in the order of application
BEFORE_TEMPERATURE: dict[str, tuple] = {}
AFTER_TEMPERATURE: dict[str, tuple] = {}


def check_sampler(sampler, vocabulary_size):
    """Raises an error unless a sampler is supported, and `k`, `p` and `temperature` are valid."""
    kind = type(sampler).__name__
    if isinstance(sampler, type) or not hasattr(sampler, "get_next_token"):
        raise ValueError(
            "`sampler` must be a `keras_hub.samplers.Sampler`, such as `TopKSampler(k=5)`, or the "
            f"name of one, such as 'top_k'; got {sampler!r}."
        )
    replaced = any(callable(getattr(type(sampler), name, None)) for name in vars(sampler))
    if type(sampler) not in GREEDY + RANDOM or replaced:
        raise ValueError(
            f"`sampler` must be {SAMPLERS}, or KerasHub's class of such a name, without a "
            f"replaced method; got a {kind}. `SamplingParams` has more options. {CUSTOM_LOOP}"
        )
    up_to_vocabulary = f"an integer from 1 to {vocabulary_size}, the size of the vocabulary"
    for name, is_valid, maximum, description in (
        ("k", is_integer, vocabulary_size, up_to_vocabulary),
        ("temperature", is_finite_number, np.inf, "a number above 0"),
        ("p", is_finite_number, 1, "a number above 0, at most 1"),
    ):
        number = getattr(sampler, name, None)
        if number is not None and not (is_valid(number) and 0 < number <= maximum):
            raise ValueError(
                f"`sampler`: `{name}` of {kind} must be {description}; got {number!r}. Use "
                "'greedy' for the most probable token."
            )


def as_sampling_params(sampler):
    """Returns the `SamplingParams` of a sampler, without its seed."""
    if isinstance(sampler, GREEDY):
        return SamplingParams(temperature=0)
    top_k, top_p = getattr(sampler, "k", None) or 0, getattr(sampler, "p", 1.0)
    return SamplingParams(temperature=sampler.temperature, top_k=top_k, top_p=top_p)


def resolve_sampling(model, sampling, batch_size):
    """Returns a `SamplingParams` and a `numpy.random.SeedSequence` for each sequence, two lists.

    Raises:
        ValueError: `sampling`, as in `generate`, is of another type or length, an id or number
            exceeds the vocabulary, or the sampler of the model is beam search.
    """
    if sampling is None:
        return [as_sampling_params(model.sampler)] * batch_size, _seeds(model.sampler, batch_size)
    params = _as_list(sampling, batch_size)
    for p in params:
        p.check_vocabulary(model.backbone.vocabulary_size)
    if isinstance(model.sampler, BeamSampler):
        raise ValueError(
            "`sampling` cannot be combined with the sampler BeamSampler. Compile with 'greedy', "
            "'top_k', 'top_p' or 'random', which `sampling` replaces."
        )
    return params, list(map(seed_sequence, params))


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


def _seeds(sampler, batch_size):
    """Returns a seed for each sequence, and advances the generator of a sampler of KerasHub."""
    seed, count = 0, 0  # of samplers that are not random
    if (generator := getattr(sampler, "seed_generator", None)) is not None:
        with _state_lock:
            seed, count = (int(number) for number in ops.convert_to_numpy(generator.state.value))
            generator.state.assign([seed, count + 1])
    return [np.random.SeedSequence([seed, count, row]) for row in range(batch_size)]


def option(stage, *inputs):
    """Decorates the function `(logits, *inputs) -> logits` of a sampling option.

    Functions run in the order of their definitions, each only if a sequence uses its option. They
    must return logits unchanged for the default of the option.

    Args:
        stage: `BEFORE_TEMPERATURE`, or `AFTER_TEMPERATURE` for a function that runs only if a
            sequence is random. Its logits are divided by the temperature, and may be only those of
            the most probable tokens. It must keep the most probable one, and its inputs are `[B]`.
        *inputs: names of inputs. The first is the option, a field of `SamplingParams`. Others are
            further fields, `in_prompt` (boolean `[B, vocabulary_size]`, True for the tokens of the
            prompt), or `stops` and `count` of the `DeviceState`, or `counts` as in
            `next_tokens`. The input of `grammar` is the masks of `make_masks`.
    """

    def add(change):
        stage[inputs[0]] = change, inputs
        return change

    return add


@option(BEFORE_TEMPERATURE, "logit_bias")
def _add_bias(logits, bias):
    return logits + bias


option(BEFORE_TEMPERATURE, "grammar")(exclude_tokens)


@option(BEFORE_TEMPERATURE, "min_new_tokens", "stops", "count")
def _exclude_stops(logits, min_new_tokens, stops, count):
    ids = ops.arange(logits.shape[-1], dtype="int32")
    is_stop, is_early = ops.equal(ids, stops[:, :, None]), (count < min_new_tokens)[:, None]
    return ops.where(ops.logical_and(ops.any(is_stop, axis=1), is_early), -np.inf, logits)


@option(BEFORE_TEMPERATURE, "repetition_penalty", "in_prompt", "counts")
def _penalize_repetition(logits, penalty, in_prompt, counts):
    penalty, is_known = penalty[:, None], ops.logical_or(in_prompt, ops.greater(counts, 0))
    factor = ops.where(ops.greater(logits, 0), 1 / penalty, penalty)
    return ops.where(is_known, logits * factor, logits)


@option(BEFORE_TEMPERATURE, "frequency_penalty", "counts")
def _penalize_frequency(logits, penalty, counts):
    return logits - penalty[:, None] * ops.cast(counts, "float32")


@option(BEFORE_TEMPERATURE, "presence_penalty", "counts")
def _penalize_presence(logits, penalty, counts):
    return ops.where(ops.greater(counts, 0), logits - penalty[:, None], logits)


@option(AFTER_TEMPERATURE, "min_p")
def _exclude_improbable(logits, min_p):
    lowest = ops.max(logits, axis=-1, keepdims=True) + ops.log(min_p[:, None])
    return ops.where(logits < lowest, -np.inf, logits)


def _changed(logits, stage, options, inputs):
    """Applies the options of `stage` that are in `options`; returns the changed logits."""
    for name, (change, names) in stage.items():
        if name in options:
            logits = change(logits, *(inputs[n] for n in names))
    return logits


def _inputs(options):
    """Returns the set of the names of the inputs of options."""
    stages = {**BEFORE_TEMPERATURE, **AFTER_TEMPERATURE}
    return {name for option in options for name in stages[option][1]}


class Features(NamedTuple):
    """Options in use, which a program depends on; the defaults choose the most probable token.

    Attributes:
        is_random: boolean, a sequence has a temperature above 0.
        has_greedy: boolean, another sequence has a temperature of 0.
        num_candidates: integer, number of most probable tokens among which sequences with a `top_k`
            of up to `MAX_CANDIDATES` draw. 0: there is no such sequence.
        draws_among_all: boolean, another sequence with a temperature above 0 draws among all.
        num_sorted: integer, number of most probable tokens that are sorted for sequences that draw
            among all. 0: these sequences keep all tokens.
        has_top_p: boolean, a sequence has a `top_p` below 1.
        options: a sorted tuple of the names of active options that are functions of logits. (The
            programs of TensorFlow would compare sets by identity.)
        has_penalties: boolean, an option needs the counts of generated tokens.
        num_logprobs: integer, number of most probable tokens whose log probabilities are returned.
            None: no log probabilities.
    """

    is_random: bool = False
    has_greedy: bool = False
    num_candidates: int = 0
    draws_among_all: bool = False
    num_sorted: int = 0
    has_top_p: bool = False
    options: tuple[str, ...] = ()
    has_penalties: bool = False
    num_logprobs: int | None = None

    @property
    def has_grammar(self):
        """True if each token depends on the text before it, which only the host parses."""
        return "grammar" in self.options

    @property
    def without_grammar(self):
        """The `Features` for the sequences that have no grammar."""
        return self._replace(options=tuple(name for name in self.options if name != "grammar"))

    @property
    def cost(self):
        """Integer, number of active options, which orders programs by time."""
        return sum(map(bool, self)) + len(self.options)


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


def features_of(params, vocabulary_size):
    """Returns the `Features` of a list of `SamplingParams`, one for each sequence."""
    sampled = [p for p in params if not p.is_greedy]
    limits = _limits(sampled, vocabulary_size)
    few = [limit for limit in limits if limit <= MAX_CANDIDATES]
    others = [p for p, limit in zip(sampled, limits, strict=True) if limit > MAX_CANDIDATES]
    num_sorted = 0
    if any(p.top_p < 1 or 0 < p.top_k < vocabulary_size for p in others):
        num_sorted = min(_power_of_two(max(limits), 1), vocabulary_size)
    num_logprobs = max((p.logprobs for p in params if p.logprobs is not None), default=None)
    if num_logprobs:
        num_logprobs = min(_power_of_two(num_logprobs, 1), vocabulary_size)
    options = {n for p in params for n in p.active_options & BEFORE_TEMPERATURE.keys()}
    options |= {n for p in sampled for n in p.active_options & AFTER_TEMPERATURE.keys()}
    return Features(
        is_random=bool(sampled),
        has_greedy=0 < len(sampled) < len(params),
        num_candidates=min(_power_of_two(max(few), MIN_CANDIDATES), vocabulary_size) if few else 0,
        draws_among_all=bool(others),
        num_sorted=num_sorted,
        has_top_p=any(p.top_p < 1 for p in sampled),
        options=tuple(sorted(options)),
        has_penalties="counts" in _inputs(options),
        num_logprobs=num_logprobs,
    )


def covers(features, needed, vocabulary_size):
    """Returns True if a program with `features` also serves sequences that need `needed`."""
    if features.has_grammar != needed.has_grammar:  # steps with a grammar compute fewer tokens
        return False
    if needed.draws_among_all and features.num_sorted and not needed.num_sorted:
        needed = needed._replace(num_sorted=vocabulary_size)  # its sequences keep all tokens
    if features.is_random and not needed.is_random:
        needed = needed._replace(has_greedy=True)
    values = (each._replace(options=set(each.options)) for each in (features, needed))
    found, least = ([-1 if v is None else v for v in each] for each in values)
    return all(map(operator.ge, found, least))


def argument_names(features):
    """Returns the sorted names of the arrays that `Features` need."""
    names = _inputs(features.options) - {"stops", "count", "counts"}
    names |= {"temperature"} if features.is_random else set()
    names |= {"top_k"} if features.num_candidates or features.num_sorted else set()
    names |= {"top_p"} if features.has_top_p else set()
    return sorted(names)


def option_arrays(params, tokens, vocabulary_size):
    """Returns `{name: array [B] or [B, N]}` for the names of `argument_names`.

    Args:
        params: a list of `SamplingParams`, one for each sequence.
        tokens: a list of integer arrays, the tokens of each sequence so far.
        vocabulary_size: integer.
    """
    arrays, size = {}, (len(params), vocabulary_size)
    for name in argument_names(features_of(params, vocabulary_size)):
        if name == "in_prompt":
            arrays[name] = np.zeros(size, bool)
            for row, ids in zip(arrays[name], tokens, strict=True):
                row[ids] = True
        elif name == "logit_bias":
            arrays[name] = np.zeros(size, "float32")
            for row, p in zip(arrays[name], params, strict=True):
                for token, bias in (p.logit_bias or {}).items():
                    row[token] = bias
        elif name == "grammar":  # masks are made before each step
            arrays[name] = neutral_masks(len(params), vocabulary_size)
        elif name == "top_k":
            arrays[name] = np.array(_limits(params, vocabulary_size), "int32")
        else:
            dtype = "int32" if params[0].__dataclass_fields__[name].type is int else "float32"
            arrays[name] = np.array([getattr(p, name) for p in params], dtype)
    return arrays


def neutral_value(name, vocabulary_size):
    """Returns the value of an array of `option_arrays` with which the option has no effect."""
    values = {"temperature": 0, "top_k": vocabulary_size, "grammar": 255}
    return values.get(name, getattr(SamplingParams, name, 0) or 0)


def _limits(params, vocabulary_size):
    """Returns a list of the number of tokens that each `top_k` keeps."""
    return [min(p.top_k if p.top_k > 0 else vocabulary_size, vocabulary_size) for p in params]


def _power_of_two(number, least):
    return max(least, 1 << (number - 1).bit_length())


def next_tokens(features, logits, state, uniform, counts, arguments):
    """Chooses the next token of each sequence.

    Args:
        features: the `Features`.
        logits: `[B, vocabulary_size]`.
        state: the `DeviceState`.
        uniform: float32 `[B]`, random numbers in [0, 1). None: no sequence is random.
        counts: int32 `[B, vocabulary_size]`, how often each token was generated. Without penalties,
            any value, which is returned unchanged.
        arguments: the arrays of `option_arrays`.

    Returns:
        `(tokens, counts, logprobs)`: int32 `[B]`, the new counts, and the `Logprobs` or ().
    """
    if features == Features():
        return dispatch.run("argmax", {"x": logits}), counts, ()
    model_logits = logits
    inputs = {**arguments, "stops": state.stops, "count": state.count, "counts": counts}
    changing = BEFORE_TEMPERATURE.keys() & features.options
    if not features.is_random:  # `argmax` excludes tokens
        changing -= {"grammar"}
    if changing - {"grammar"}:
        logits = ops.cast(logits, "float32")
    logits = _changed(logits, BEFORE_TEMPERATURE, changing, inputs)
    if features.is_random:
        token = _draw(features, logits, uniform, inputs)
    else:
        token = dispatch.run("argmax", {"x": logits, "masks": arguments.get("grammar")})
    if features.has_penalties:
        ids = ops.arange(logits.shape[-1], dtype="int32")
        counts = counts + ops.cast(ops.equal(ids, token[:, None]), "int32")
    logprobs: Any = ()
    if features.num_logprobs is not None:
        logprobs = log_probabilities(model_logits, token, features.num_logprobs)
    return token, counts, logprobs


def empty_logprobs(num_logprobs, size):
    """Returns zeros for the `Logprobs` of `size` tokens, a tuple of integers, or ()."""
    if num_logprobs is None:
        return ()
    top = *size, num_logprobs
    return Logprobs(ops.zeros(size), ops.zeros(top), ops.zeros(top, "int32"))


def _draw(features, logits, uniform, inputs):
    temperature = inputs["temperature"]
    divisor = ops.where(ops.greater(temperature, 0), temperature, 1.0)[:, None]
    token = None
    if features.draws_among_all:
        token = _draw_among_all(features, logits, divisor, uniform, inputs)
    if features.num_candidates:
        few = _draw_among_candidates(features, logits, divisor, uniform, inputs)
        is_few = inputs["top_k"] <= MAX_CANDIDATES
        token = few if token is None else ops.where(is_few, few, token)
    if not features.has_greedy:
        return token
    best = ops.cast(ops.argmax(logits, axis=-1), "int32")
    return ops.where(ops.greater(temperature, 0), token, best)


# Both functions below assign intervals of [0, 1) to tokens in the order of their ids.


def _draw_among_candidates(features, logits, divisor, uniform, inputs):
    """Draws tokens [B] of sequences with a `top_k` of up to `MAX_CANDIDATES`."""
    options = {"x": logits, "count": features.num_candidates}
    candidates, ids, _ = dispatch.run("top_logits", options)
    scaled = candidates / divisor
    below_best = _changed(scaled, AFTER_TEMPERATURE, features.options, inputs) - scaled[:, :1]
    rank = ops.arange(features.num_candidates, dtype="int32")
    kept = rank < inputs["top_k"][:, None]
    weights = ops.where(kept, ops.exp(below_best), 0.0)
    weights = ops.cast(ops.round(weights * LARGEST_WEIGHT), "int32")
    if features.has_top_p:
        top_p = inputs["top_p"][:, None]
        more_probable = ops.cast(ops.cumsum(weights, axis=-1) - weights, "float32")
        total = ops.cast(ops.sum(weights, axis=-1, keepdims=True), "float32")
        dropped = ops.logical_and(top_p < 1, more_probable >= top_p * total)
        weights = ops.where(dropped, 0, weights)
    is_counted = ops.cast(ids[:, None, :] <= ids[:, :, None], "int32")
    cumulative = ops.sum(weights[:, None, :] * is_counted, axis=-1)
    total = ops.cast(ops.sum(weights, axis=-1), "float32")
    is_above = ops.cast(cumulative, "float32") > (uniform * total)[:, None]
    # Logits of NaN have no interval; the last token id is at least valid.
    return ops.min(ops.where(is_above, ids, logits.shape[-1] - 1), axis=-1)


def _draw_among_all(features, logits, divisor, uniform, inputs):
    """Draws tokens [B] of sequences without a `top_k` of up to `MAX_CANDIDATES`."""
    logits = apply_layout(logits, "sampled_logits")  # gathered once, not by several operations
    scaled = ops.cast(logits, "float32") / divisor
    scaled = _changed(scaled, AFTER_TEMPERATURE, features.options, inputs)
    if not features.num_sorted:
        return _index_of(ops.softmax(scaled, axis=-1), uniform)
    if features.num_sorted <= scaled.shape[-1] // ALL_PER_SORTED:
        options = {"x": scaled, "count": features.num_sorted}
        values, ids, _ = dispatch.run("top_logits", options)
        kept, order = _kept(features, values, inputs), ops.argsort(ids, axis=-1)
        weights = ops.softmax(ops.where(kept, values, -np.inf), axis=-1)
        index = _index_of(ops.take_along_axis(weights, order, axis=-1), uniform)
        rank = ops.take_along_axis(order, index[:, None], axis=-1)
        return ops.take_along_axis(ids, rank, axis=-1)[:, 0]
    values, _ = ops.top_k(scaled, features.num_sorted, sorted=True)
    kept = _kept(features, values, inputs)
    lowest = ops.min(ops.where(kept, values, np.inf), axis=-1, keepdims=True)
    # Among tokens that share the lowest kept logit, the smallest ids are kept.
    num_equal = ops.sum(ops.cast(kept, "int32"), axis=-1, keepdims=True)
    num_equal = num_equal - ops.sum(ops.cast(values > lowest, "int32"), axis=-1, keepdims=True)
    is_equal = ops.equal(scaled, lowest)
    is_first = ops.cumsum(ops.cast(is_equal, "int32"), axis=-1) <= num_equal
    kept = ops.logical_or(scaled > lowest, ops.logical_and(is_equal, is_first))
    return _index_of(ops.softmax(ops.where(kept, scaled, -np.inf), axis=-1), uniform)


def _index_of(probabilities, uniform):
    """Returns the index `[B]` whose interval contains the random number."""
    cumulative = ops.cumsum(probabilities, axis=-1)
    reached = ops.less_equal(cumulative, uniform[:, None] * cumulative[:, -1:])
    return ops.sum(ops.cast(reached, "int32"), axis=-1)


def _kept(features, values, inputs):
    """Returns a mask of the sorted logits, True for the first ones, which `top_k`, `top_p` keep."""
    kept = ops.arange(features.num_sorted, dtype="int32") < inputs["top_k"][:, None]
    if features.has_top_p:
        top_p = inputs["top_p"][:, None]
        probabilities = ops.softmax(ops.where(kept, values, -np.inf), axis=-1)
        more_probable = ops.cumsum(probabilities, axis=-1) - probabilities
        reached = more_probable >= top_p * (1 - ROUNDING)
        dropped = ops.logical_and(top_p < 1, reached)
        kept = ops.logical_and(kept, ops.logical_not(dropped))
    return kept


def log_probabilities(logits, token, number):
    """Returns the `Logprobs` of tokens [B], with those of the `number` most probable tokens."""
    options = {"x": logits, "count": max(number, 1)}
    top, ids, log_sum = dispatch.run("top_logits", options)
    chosen = ops.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    chosen = ops.cast(chosen, "float32") - log_sum
    return Logprobs(chosen, top[:, :number] - log_sum[:, None], ids[:, :number])
