"""Sequences of a prompt and its new tokens, the rules for their ends, and results of `generate`."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_recurrent.generation.grammar import consume
from keras_recurrent.generation.prompts import pad_prompts
from keras_recurrent.generation.sampling_params import TokenLogprobs, token_logprobs
from keras_recurrent.generation.text import hidden_stop_tokens

LARGEST_UNIFORM = np.float32(1 - 2**-23)  # its product with a sum is below the sum in float32


class Sequence:
    """Prompt, options and new tokens of one answer, as token ids; text is not part of it.

    Args:
        prompt: int32 array, all tokens so far, at least one.
        params: the `SamplingParams`.
        seed: a `numpy.random.SeedSequence`.
        max_new_tokens: integer.
        stop_token_ids: a tuple of integers, which may be empty.
        listener: a function of this sequence, which is called after each new token and by `end`.
            It may call `stop`. None: no function.
        matcher: the `LLMatcher` of the grammar of `params`, or None.

    Attributes:
        token_ids: a list of integers, the new tokens.
        logprobs: a list of the `TokenLogprobs` of the new tokens; empty without `params.logprobs`.
        finish_reason: `"stop"` after a stop token or stop string, `"length"` after the maximum
            number of tokens, another reason after `end`, or None.
        num_launched: integer, number of new tokens whose steps were launched.
        score: float, the score of beam search, or None.
    """

    def __init__(
        self, prompt, params, seed, max_new_tokens, stop_token_ids=(), listener=None, matcher=None
    ):
        self.prompt, self.params, self.max_new_tokens = prompt, params, max_new_tokens
        self.stop_token_ids, self._listener = frozenset(stop_token_ids), listener
        self.matcher = matcher
        self._generator: Any = None
        if not params.is_greedy:
            self._generator = np.random.Generator(np.random.Philox(seed))
        self.token_ids: list[int] = []
        self.logprobs: list = []
        self.finish_reason: str | None = None if max_new_tokens else "length"
        self.num_launched, self.score = 0, None

    @property
    def remaining_tokens(self):
        """Maximum number of further tokens."""
        return self.max_new_tokens - len(self.token_ids)

    @property
    def ends_on_device(self):
        """True if the sequence has ended on the device: after a stop token or the last token."""
        is_stopped = bool(self.token_ids) and self.token_ids[-1] in self.stop_token_ids
        return is_stopped or not self.remaining_tokens

    def uniform(self, count):
        """Returns random numbers for the next tokens, float32 `[count]`; 0 if greedy."""
        if self._generator is None:
            return 0
        return np.minimum(self._generator.random(count, "float32"), LARGEST_UNIFORM)

    def add(self, token, logprobs=None):
        """Appends a token, after which the sequence may have ended.

        logprobs: its `Logprobs`, a number and two NumPy arrays [K], or None.

        Raises:
            GrammarError: the grammar exceeds a limit.
        """
        if self.matcher is not None:
            consume(self.matcher, token)
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(token_logprobs(self.params.logprobs, token, logprobs))
        if token in self.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_new_tokens:
            self.finish_reason = "length"
        self._notify()

    def copy(self, token_ids, score):
        """Returns a sequence of this prompt with a list of new tokens; it may have ended."""
        options = self.params, None, self.max_new_tokens, self.stop_token_ids
        sequence = Sequence(self.prompt, *options)
        for token in token_ids:
            sequence.add(token)
        sequence.score = score
        return sequence

    def stop(self, num_tokens):
        """Ends the sequence after `num_tokens` new tokens, which complete a stop string."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]
        self.finish_reason = "stop"

    def end(self, reason):
        """Ends the sequence for a reason from outside, such as `"timeout"`."""
        self.finish_reason = reason
        self._notify()

    def _notify(self):
        """Calls the listener after a new token or the end."""
        if self._listener is not None:
            self._listener(self)


class DeviceState(NamedTuple):
    """State of sequences on the device, between two steps.

    Attributes:
        token: int32 `[B, 1]`, the last token of each sequence, which the cache does not contain.
        active: boolean `[B, 1]`, False for sequences that have ended, and for free slots.
        remaining_tokens: int32 `[B]`, maximum number of further tokens.
        count: int32 `[B]`, number of new tokens.
        stops: int32 `[B, S]`, the stop tokens of each sequence, padded with -1.
        has_grammar: boolean `[B, 1]`, True for sequences whose next token waits for a mask.
    """

    token: Any
    active: Any
    remaining_tokens: Any
    count: Any
    stops: Any
    has_grammar: Any


def advance(state, sampled):
    """Returns the `DeviceState` after one more token of each active sequence.

    A sequence ends at a stop token or its last token, as in `Sequence.ends_on_device`.

    sampled: integers `[B]`, the next token of each sequence, unused if it is not active.
    """
    sampled = ops.cast(sampled, "int32")[:, None]
    token = ops.where(state.active, sampled, state.token)
    advanced = ops.cast(state.active[:, 0], "int32")
    remaining = state.remaining_tokens - advanced
    is_stop = ops.any(ops.equal(token, state.stops), axis=1, keepdims=True)
    continues = ops.logical_and(remaining[:, None] > 0, ops.logical_not(is_stop))
    active = ops.logical_and(state.active, continues)
    count = state.count + advanced
    return state._replace(token=token, active=active, remaining_tokens=remaining, count=count)


@dataclasses.dataclass(frozen=True)
class GenerationOutput:
    """Result of `generate` with `SamplingParams(logprobs=...)`, and of `stream` so far.

    Also the result of `generate` with `BeamSampler(return_all_beams=True)`. In this case, `texts`,
    `token_ids` and `finish_reason` contain for each prompt a list of its sequences, the best first,
    instead of one sequence. `texts` of a single prompt is its list. `logprobs` are empty.

    Attributes:
        texts: a list of strings, one for each prompt, or a string for a single one; the text that
            `generate` otherwise returns. None without a preprocessor.
        token_ids: a list of lists of integers, the new tokens of each sequence, including the stop
            token and those of the stop string.
        logprobs: a list of lists of `TokenLogprobs`, one for each new token; an empty list for a
            prompt without `logprobs`.
        finish_reason: a list of strings: `"stop"` for a sequence that ended at a stop token or stop
            string, `"length"` for one that reached its maximum number of tokens, and None, in a
            stream, for one that has not ended.
        cache: the `GenerationCache` after the last token, if `return_cache` is True, else None.
            With several sequences of a prompt, it is the cache of the best one.
        scores: a list of lists of floats, the scores of the sequences of each prompt, as
            `BeamSampler` defines them. None: no beam search.
    """

    texts: Any
    token_ids: list[Any]
    logprobs: list[list[TokenLogprobs]]
    finish_reason: list[Any]
    cache: Any = None
    scores: list[list[float]] | None = None


def format_result(preprocessor, prompts, strip_prompt, cache, sequences, texts):
    """Returns the result of `generate` from `Prompts` and their `Sequence`s.

    cache: the `GenerationCache` after the last token, or None.
    texts: a list of the `StreamedText` of each sequence, or None without stop strings.
    """
    shown = prompts.shown_tokens(strip_prompt)
    if preprocessor is None:
        tokens = [[*prompt, *s.token_ids] for prompt, s in zip(shown, sequences, strict=True)]
        generated = pad_prompts(tokens, prompts.max_length - prompts.num_context)
    else:
        generated = continued_texts(preprocessor, shown, sequences, texts)
        generated = generated[0] if prompts.is_single else generated
    if any(s.params.logprobs is not None for s in sequences):
        return generation_output(sequences, None if preprocessor is None else generated, cache)
    return generated if cache is None else (generated, cache)


def format_beams(preprocessor, prompts, strip_prompt, cache, beams):
    """Returns the `GenerationOutput` of `search_beams`; other arguments as in `format_result`."""
    texts: Any = None
    if preprocessor is not None:
        pairs = zip(prompts.shown_tokens(strip_prompt), beams, strict=True)
        texts = [continued_texts(preprocessor, [prompt] * len(row), row) for prompt, row in pairs]
        texts = texts[0] if prompts.is_single else texts
    token_ids = [[s.token_ids for s in row] for row in beams]
    reasons = [[s.finish_reason for s in row] for row in beams]
    scores = [[s.score for s in row] for row in beams]
    return GenerationOutput(texts, token_ids, [[] for _ in beams], reasons, cache, scores)


def continued_texts(preprocessor, prompts, sequences, texts=None):
    """Returns a list of the texts of prompts, lists of token ids, and their `Sequence`s."""
    tokens = []
    for number, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        new, is_cut = sequence.token_ids, texts is not None and texts[number].is_stopped
        is_stop = bool(new) and new[-1] in sequence.stop_token_ids
        is_hidden = is_stop and not is_cut and new[-1] in hidden_stop_tokens(preprocessor)
        tokens.append([*prompt, *(new[:-1] if is_hidden else new)])
    found = preprocessor.generate_postprocess(pad_prompts(tokens, max(1, *map(len, tokens))))
    cuts = [text.num_cut() for text in texts] if texts else [0] * len(found)
    return [text[: len(text) - cut] for text, cut in zip(found, cuts, strict=True)]


def concatenate_results(results):
    """Concatenates results of several batches: lists of texts, tokens, or `GenerationOutput`s."""
    first = results[0]
    if isinstance(first, dict):
        return {name: np.concatenate([r[name] for r in results]) for name in first}
    if isinstance(first, GenerationOutput):
        names = [name for name, value in vars(first).items() if value is not None]
        lists = ([x for r in results for x in getattr(r, name)] for name in names)
        return GenerationOutput(**{**vars(first), **dict(zip(names, lists, strict=True))})
    return [text for texts in results for text in texts]


def generation_output(sequences, texts, cache=None):
    """Returns the `GenerationOutput` of `Sequence`s, with the given texts and cache."""
    token_ids, logprobs = [list(s.token_ids) for s in sequences], [s.logprobs for s in sequences]
    return GenerationOutput(texts, token_ids, logprobs, [s.finish_reason for s in sequences], cache)
