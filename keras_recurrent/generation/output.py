"""What `generate` returns with log probabilities, and `stream` keeps."""

import dataclasses
from typing import Any

from keras_recurrent.generation.sampling import Logprobs


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
    """

    texts: Any
    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    finish_reason: list[str | None]
    cache: Any = None


def generation_output(params, token_ids, logprobs, texts, finish_reason, cache=None):
    """Returns a `GenerationOutput`.

    Args:
        params: a list of the `SamplingParams` of each sequence.
        token_ids, texts, finish_reason, cache: as in `GenerationOutput`.
        logprobs: the `Logprobs` of NumPy arrays `[B, N]` and `[B, N, K]`, or None.
    """
    rows: list = []
    for number, (row_params, ids) in enumerate(zip(params, token_ids, strict=True)):
        row = logprobs and Logprobs(*(each[number, : len(ids)] for each in logprobs))
        rows.append(_token_logprobs(row_params, ids, row))
    return GenerationOutput(texts, [list(ids) for ids in token_ids], rows, finish_reason, cache)


def _token_logprobs(params, token_ids, logprobs):
    """Returns the `TokenLogprobs` of one sequence.

    Args:
        params: its `SamplingParams`, or None.
        token_ids: its new tokens.
        logprobs: the `Logprobs` of these tokens, `[N]` and `[N, K]`, or None.
    """
    number = getattr(params, "logprobs", None)
    if number is None or logprobs is None:
        return []
    rows = zip(token_ids, logprobs.chosen, logprobs.token_ids, logprobs.top, strict=True)
    return [
        TokenLogprobs(int(token), float(chosen), _top(ids[:number], top[:number]))
        for token, chosen, ids, top in rows
    ]


def _top(token_ids, logprobs):
    return dict(zip(token_ids.tolist(), logprobs.tolist(), strict=True))
