"""Results of `generate`: text, tokens, or a `GenerationOutput`, which `stream` has too."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from keras_recurrent.generation.prompts import pad_prompts
from keras_recurrent.generation.text import hidden_stop_tokens


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of one generated token, by the model, before all options of sampling.

    Attributes:
        token_id: integer, the token.
        logprob: float, its log probability in nats.
        top: a dictionary `{token id: log probability}` of the most probable tokens.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


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
    generated = continued_prompts(preprocessor, prompts, strip_prompt, sequences, texts)
    generated = generated[0] if prompts.is_single else generated
    if any(s.params.logprobs is not None for s in sequences):
        return generation_output(sequences, None if preprocessor is None else generated, cache)
    return generated if cache is None else (generated, cache)


def format_beams(preprocessor, prompts, strip_prompt, cache, beams):
    """Returns the `GenerationOutput` of `Beams`; other arguments as in `format_result`."""
    texts: Any = None
    counts = list(map(len, beams.scores))
    if preprocessor is not None:
        ranks = zip(*beams.sequences, strict=True)
        options = preprocessor, prompts, strip_prompt
        texts = zip(*(continued_prompts(*options, rank, None) for rank in ranks), strict=True)
        texts = [list(row[:count]) for row, count in zip(texts, counts, strict=True)]
        texts = texts[0] if prompts.is_single else texts
    found = [row[:count] for row, count in zip(beams.sequences, counts, strict=True)]
    token_ids = [[s.token_ids for s in sequences] for sequences in found]
    reasons = [[s.finish_reason for s in sequences] for sequences in found]
    return GenerationOutput(texts, token_ids, [[] for _ in found], reasons, cache, beams.scores)


def continued_prompts(preprocessor, prompts, strip_prompt, sequences, texts):
    """Returns a list of texts, or without a preprocessor a dictionary of tokens."""
    tokens = []
    for number, sequence in enumerate(sequences):
        prompt = [] if strip_prompt else prompts.tokens[number][prompts.num_context :]
        is_cut = texts is not None and texts[number].is_stopped
        is_hidden = not is_cut and _ends_in_hidden_token(preprocessor, sequence)
        tokens.append([*prompt, *sequence.token_ids][: -1 if is_hidden else None])
    if preprocessor is None:
        return pad_prompts(tokens, prompts.max_length - prompts.num_context)
    found = preprocessor.generate_postprocess(pad_prompts(tokens, max(1, *map(len, tokens))))
    cuts = [text.num_cut() for text in texts] if texts else [0] * len(found)
    return [text[: len(text) - cut] for text, cut in zip(found, cuts, strict=True)]


def _ends_in_hidden_token(preprocessor, sequence):
    last = sequence.token_ids[-1] if sequence.token_ids else None
    return last in hidden_stop_tokens(preprocessor) and last in sequence.stop_token_ids


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


def token_logprobs(params, token, logprobs):
    """Returns the `TokenLogprobs` of a token from its `Logprobs`, a number and two arrays [K]."""
    pairs = zip(logprobs.token_ids.tolist(), logprobs.top.tolist(), strict=True)
    top = dict(itertools.islice(pairs, params.logprobs))
    return TokenLogprobs(token, float(logprobs.chosen), top)
