"""Options that choose the next token from logits, and log probabilities, without a framework."""

import dataclasses
import functools
import inspect
import itertools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_recurrent.checks.arguments import is_finite_number, is_integer

LEAST = 1e-6  # minimum of factors, so that products are far from 0 and inf
MAX_BIAS = 100
MAX_SEED = 2**64 - 1
MAX_ANSWERS = 128  # to a prompt, as in OpenAI's API
# Names in other packages, and options that belong to a call.
RENAMED = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "eos_token_id": "stop_token_ids",
}
OPTIONS_OF_CALLS = "max_new_tokens", "max_length", "stop", "stop_token_ids"


def number(default, description, is_valid):
    """Returns the field of an option that is a finite number.

    Args:
        default: number with which the option has no effect.
        description: string, what values must be, for error messages.
        is_valid: a function that returns True if a finite number is in range.
    """
    return _field(default, description, lambda value: is_finite_number(value) and is_valid(value))


def integer(default, description, is_valid):
    """Returns the field of an option that is an integer, as `number`, or a default of None."""
    return _field(default, description, lambda value: is_integer(value) and is_valid(value))


def _field(default, description, is_valid):
    metadata = {"description": description, "is_valid": is_valid}
    return dataclasses.field(default=default, metadata=metadata)


def _is_moderate(value):
    return LEAST <= value <= 1 / LEAST


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of sampling.

    Most names and defaults follow vLLM; its `min_tokens` is `min_new_tokens`.

    The options apply in this order: `logit_bias`, `grammar`, `min_new_tokens`, the penalties,
    `temperature`, `min_p`, `top_k`, `top_p`. A program or CUDA graph serves all values of the
    options in use; only `top_k` and `logprobs` need one for each power of two.

    With a `seed`, a prompt gets the same random numbers on all backends, whatever else is in its
    batch. Without one, the seed comes from Python's `random`, which `keras.utils.set_random_seed`
    makes reproducible.

    Args:
        temperature: number from 1e-6 to 1e6, divides the logits. 0: the most probable token
            (greedy).
        top_k: integer, samples from the k most probable tokens. 0 or -1: from all.
        top_p: number from 1e-6 to 1, samples from the smallest set of most probable tokens, among
            the `top_k`, whose probabilities sum to at least p.
        min_p: number in [0, 1], excludes tokens less probable than this fraction of the most
            probable one.
        repetition_penalty: number from 1e-6 to 1e6. Logits of tokens that are in the prompt or were
            generated are divided by it if positive, else multiplied. 1: none.
        presence_penalty: number from -2 to 2, is subtracted from the logits of generated tokens.
        frequency_penalty: number from -2 to 2, is subtracted once for each time that a token was
            generated.
        logit_bias: a dictionary `{token id: number from -100 to 100}`, which is added to logits.
        grammar: the form of the generated text, either a dictionary that is a JSON schema, or a
            string that is a grammar in Lark's syntax, such as `'start: /[0-9]+/'`. A stop token can
            only follow a complete text; at its maximum length, a sequence may end with an
            incomplete one. Requires the extra `structured` of this package. For details, see
            docs/structured.md. None: any text.
        min_new_tokens: integer, minimum number of new tokens; stop tokens are not sampled earlier.
        seed: integer from 0 to 2**64 - 1. None: a random seed.
        logprobs: integer, number of most probable tokens whose log probabilities are returned, in
            addition to that of the sampled token. They are computed from the unmodified logits, in
            nats. None: no log probabilities.
        n: integer from 1 to 128, number of answers to the prompt, which is processed once. The
            answers to a prompt are adjacent in results; the first equals the answer with `n=1`.

    Raises:
        ValueError: a value is out of range, or `grammar` is combined with `min_new_tokens`.

    Example:

    >>> import keras_recurrent
    >>> from keras_recurrent.models import SamplingParams
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=1)
    >>> text = model.generate("All happy", max_new_tokens=8, sampling=sampling)
    >>> text == model.generate("All happy", max_new_tokens=8, sampling=sampling)
    True
    """

    temperature: float = number(
        1.0, "0, or a number from 1e-6 to 1e6", lambda v: v == 0 or _is_moderate(v)
    )
    top_k: int = integer(0, "an integer of at least 0, or -1 for all tokens", lambda v: v >= -1)
    top_p: float = number(1.0, "a number from 1e-6 to 1", lambda v: LEAST <= v <= 1)
    min_p: float = number(0.0, "a number from 0 to 1", lambda v: 0 <= v <= 1)
    repetition_penalty: float = number(1.0, "a number from 1e-6 to 1e6", _is_moderate)
    presence_penalty: float = number(0.0, "a number from -2 to 2", lambda v: -2 <= v <= 2)
    frequency_penalty: float = number(0.0, "a number from -2 to 2", lambda v: -2 <= v <= 2)
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    grammar: Mapping[str, Any] | str | None = dataclasses.field(default=None, hash=False)
    min_new_tokens: int = integer(0, "an integer from 0 to 2**31 - 1", lambda v: 0 <= v < 2**31)
    seed: int | None = integer(
        None, "an integer from 0 to 2**64 - 1, or None", lambda v: 0 <= v <= MAX_SEED
    )
    logprobs: int | None = integer(None, "an integer of at least 0, or None", lambda v: v >= 0)
    n: int = integer(1, f"an integer from 1 to {MAX_ANSWERS}", lambda v: 1 <= v <= MAX_ANSWERS)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, is_valid = getattr(self, field.name), field.metadata.get("is_valid")
            is_absent = value is None and field.default is None
            if is_valid is not None and not is_absent and not is_valid(value):
                description = field.metadata["description"]
                raise ValueError(f"`{field.name}` must be {description}; got {value!r}.")
        if not isinstance(self.grammar, (Mapping, str, type(None))):
            raise ValueError(
                "`grammar` must be a JSON schema, a dictionary, or a grammar in Lark's syntax, a "
                f"string; got a {type(self.grammar).__name__}."
            )
        if self.grammar is not None and self.min_new_tokens:
            raise ValueError(
                "`grammar` cannot be combined with `min_new_tokens`: complete texts may be shorter."
            )
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                "`logit_bias` must be a dictionary of token ids and numbers; got a "
                f"{type(self.logit_bias).__name__}."
            )
        for token, bias in self.logit_bias.items():
            if not is_integer(token) or token < 0:
                raise ValueError(f"`logit_bias` must have token ids as keys; got {token!r}.")
            if not is_finite_number(bias) or abs(bias) > MAX_BIAS:
                raise ValueError(
                    f"`logit_bias` must have numbers from -{MAX_BIAS} to {MAX_BIAS} as values; "
                    f"got {bias!r} for token {token}."
                )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias) or None)

    @property
    def is_greedy(self):
        return self.temperature == 0

    @functools.cached_property
    def active_options(self):  # a set of the names of options whose values are not the defaults
        fields = dataclasses.fields(self)
        return {field.name for field in fields if getattr(self, field.name) != field.default}

    def check_vocabulary(self, vocabulary_size):
        """Raises a `ValueError` if `logit_bias` or `logprobs` exceed the vocabulary of a model."""
        for token in self.logit_bias or ():
            if token >= vocabulary_size:
                raise ValueError(
                    f"`logit_bias` must have token ids from 0 to {vocabulary_size - 1}, the "
                    f"vocabulary of the model; got {token}."
                )
        if (self.logprobs or 0) > vocabulary_size:
            raise ValueError(
                f"`logprobs` must be at most {vocabulary_size}, the size of the vocabulary; got "
                f"{self.logprobs}."
            )


def seed_sequence(params):
    """Returns the `numpy.random.SeedSequence` of a seed, or of a random one."""
    seed = random.getrandbits(64) if params.seed is None else params.seed
    return np.random.SeedSequence(seed)


def answer_seeds(params, seed):
    """Returns a `numpy.random.SeedSequence` for each answer to a prompt; the first is `seed`."""
    return [seed, *seed.spawn(params.n - 1)]


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of one token, computed by the model before all options of sampling.

    Attributes:
        token_id: integer, the token.
        logprob: float, its log probability in nats. None for the first token of a prompt.
        top: a dictionary `{token id: log probability}` of the most probable tokens.
    """

    token_id: int
    logprob: float | None
    top: dict[int, float]


def token_logprobs(number, token, logprobs):
    """Returns the `TokenLogprobs` of a token, with the `number` most probable tokens.

    logprobs: its `Logprobs`, a number and two NumPy arrays of at least `number` elements.
    """
    pairs = zip(logprobs.token_ids.tolist(), logprobs.top.tolist(), strict=True)
    return TokenLogprobs(token, float(logprobs.chosen), dict(itertools.islice(pairs, number)))


def explains_options(method):
    """Decorates a method so that errors for unknown keyword arguments name the right ones."""
    names = inspect.signature(method).parameters

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        for name in [name for name in kwargs if name not in names]:
            option = RENAMED.get(name, name)
            if option in names:
                remedy = f"Pass `{option}`"
            elif "sampling" in names and option in SamplingParams.__dataclass_fields__:
                remedy = f"Pass `sampling=SamplingParams({option}={kwargs[name]!r:.80})`"
            elif "sampling" not in names and option in OPTIONS_OF_CALLS:
                remedy = f"Pass `{option}` to `generate`"
            else:
                remedy = f"Its arguments are {', '.join(f'`{name}`' for name in list(names)[1:])}"
                if "inputs" in names and "sampling" not in names:
                    remedy += "; options of generation belong to `generate`"
            owner = type(self).__name__ if method.__name__ == "__init__" else method.__name__
            raise TypeError(f"`{owner}` has no argument `{name}`. {remedy}.")
        return method(self, *args, **kwargs)

    return call


SamplingParams.__init__ = explains_options(SamplingParams.__init__)  # type: ignore[method-assign]
