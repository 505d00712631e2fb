"""Results of `generate`: text, tokens, or a `GenerationOutput`, which `stream` has too."""

import dataclasses
from typing import Any

import numpy as np

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
            With several sequences of a prompt, it is that of the best one.
        scores: a list of lists of floats, the scores of the sequences of each prompt, as
            `BeamSampler` defines them. None: no beam search.
    """

    texts: Any
    token_ids: list[Any]
    logprobs: list[list[TokenLogprobs]]
    finish_reason: list[Any]
    cache: Any = None
    scores: list[list[float]] | None = None


def format_result(preprocessor, prompts, request, result, strip_prompt, cache=None):
    """Returns the result of `generate`.

    Args:
        preprocessor: that of the model, or None.
        prompts: the `Prompts`.
        request: the `Request`.
        result: the `Result`.
        strip_prompt: boolean, True leaves out the prompts.
        cache: the `GenerationCache` after the last token, or None.
    """

    def sequences(result):
        return _sequences(preprocessor, prompts, request, result, strip_prompt)

    if result.hypotheses is not None:
        texts = None
        if preprocessor is not None:
            texts = zip(*map(sequences, request.results_of_ranks(result.hypotheses)), strict=True)
        output = request.output_of_beams(result.hypotheses, texts, cache)
        is_single = texts is not None and prompts.is_single
        return dataclasses.replace(output, texts=output.texts[0]) if is_single else output
    generated = sequences(result)
    generated = generated[0] if prompts.is_single else generated
    if result.logprobs is not None:
        return request.output(result, None if preprocessor is None else generated, cache)
    return generated if cache is None else (generated, cache)


def _sequences(preprocessor, prompts, request, result, strip_prompt):
    """Returns a list of texts, or without a preprocessor a dictionary of tokens."""
    token_ids, lengths = result[:2]
    first = prompts.lengths if strip_prompt else prompts.num_context
    counts, width = lengths - first, token_ids.shape[1] - int(prompts.num_context[0])
    output = slice_rows(token_ids, first, counts, width)
    if preprocessor is not None:
        counts = request.shown_lengths(result, preprocessor) - first
    batch = {"token_ids": output, "padding_mask": np.arange(width) < counts[:, None]}
    if preprocessor is None:
        return batch
    texts = preprocessor.generate_postprocess(batch)
    if request.stop_strings is not None:
        texts = request.stop_strings.trim(texts, lengths - prompts.lengths)
    return texts


def slice_rows(token_ids, starts, counts, width):
    """Returns `counts[i]` tokens of each row i from `starts[i]` on, int32 `[B, width]`, padded."""
    output = np.zeros((len(counts), width), "int32")
    for row, start, count, tokens in zip(output, starts, counts, token_ids, strict=True):
        row[:count] = tokens[start : start + count]
    return output


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
        rows.append(token_logprobs(row_params, ids, row))
    return GenerationOutput(texts, [list(ids) for ids in token_ids], rows, finish_reason, cache)


def token_logprobs(params, token_ids, logprobs):
    """Returns the `TokenLogprobs` of one sequence.

    Args:
        params: its `SamplingParams`.
        token_ids: its new tokens.
        logprobs: the `Logprobs` of these tokens, `[N]` and `[N, K]`, or None.
    """
    number = params.logprobs
    if number is None or logprobs is None:
        return []
    top_ids, top = logprobs.token_ids[:, :number], logprobs.top[:, :number]
    rows = zip(token_ids, logprobs.chosen, top_ids, top, strict=True)
    return [
        TokenLogprobs(int(token), float(chosen), dict(zip(ids.tolist(), top.tolist(), strict=True)))
        for token, chosen, ids, top in rows
    ]
