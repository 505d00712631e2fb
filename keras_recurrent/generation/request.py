"""Requests of decoding loops, and their results."""

from typing import Any, NamedTuple

import numpy as np

from keras_recurrent.generation.output import GenerationOutput, generation_output
from keras_recurrent.generation.text import hidden_stop_tokens


class Request(NamedTuple):
    """Prompts of one call, and how tokens are generated after them.

    Attributes:
        token_ids: int32 `[B, T]`, a NumPy array: prompts followed by padding.
        lengths: int32 `[B]`, lengths of the prompts, at least 1.
        limits: int32 `[B]`, maximum lengths of the sequences, from `lengths` to T.
        stop_token_ids: a tuple of integers, which may be empty.
        sampling: the `Sampling`.
        stop_strings: the `StopStrings`, or None.
    """

    token_ids: Any
    lengths: Any
    limits: Any
    stop_token_ids: tuple[int, ...]
    sampling: Any
    stop_strings: Any = None

    @property
    def free_length(self):
        """Maximum number of new tokens of each sequence, int32 `[B]`."""
        return (self.limits - self.lengths).astype("int32")

    @property
    def last_token(self):
        """Last token of each prompt, `[B, 1]`."""
        return self.token_ids[np.arange(len(self.lengths)), self.lengths - 1][:, None]

    def finish_reasons(self, token_ids, has_stop_string):
        """Returns `"stop"`, `"length"` or None for each sequence, as in `GenerationOutput`.

        Args:
            token_ids: a list of lists of integers, the new tokens of each sequence.
            has_stop_string: a list of booleans, True for sequences that end in a stop string.
        """
        rows = zip(token_ids, has_stop_string, self.free_length, strict=True)
        return [self._finish_reason(*row) for row in rows]

    def _finish_reason(self, ids, has_stop_string, free_length):
        if has_stop_string or (ids and ids[-1] in self.stop_token_ids):
            return "stop"
        return "length" if len(ids) >= free_length else None

    def shown_lengths(self, result, preprocessor):
        """Returns the lengths of sequences in a `Result` without stop tokens that are not shown."""
        token_ids, lengths = result[:2]
        last = token_ids[np.arange(len(lengths)), lengths - 1]
        is_hidden = np.isin(last, self.hidden_stop_tokens(preprocessor))
        is_hidden &= lengths > self.lengths
        if self.stop_strings is not None:
            is_hidden &= ~self.stop_strings.end(lengths - self.lengths)
        return lengths - is_hidden

    def hidden_stop_tokens(self, preprocessor):
        """Returns a list of the stop tokens that end an answer, which its text does not show."""
        return [id for id in hidden_stop_tokens(preprocessor) if id in self.stop_token_ids]

    def output(self, result, texts, cache):
        """Returns the `GenerationOutput` of a `Result`, with these texts and cache."""
        counts = result.lengths - self.lengths
        rows = zip(result.token_ids, self.lengths, counts, strict=True)
        token_ids = [row[start : start + count].tolist() for row, start, count in rows]
        strings = self.stop_strings
        stopped = strings.end(counts) if strings else [False] * len(counts)
        reasons = self.finish_reasons(token_ids, stopped)
        params = self.sampling.params
        return generation_output(params, token_ids, result.logprobs, texts, reasons, cache)

    def results_of_ranks(self, hypotheses):
        """Returns a list of `Result`s: the best sequence of each prompt, the second best, …."""
        ranks = hypotheses.counts.shape[1]
        return [self.result(hypotheses.tokens[:, r], hypotheses.counts[:, r]) for r in range(ranks)]

    def output_of_beams(self, hypotheses, texts, cache):
        """Returns the `GenerationOutput` of `Hypotheses`.

        Args:
            hypotheses: the `Hypotheses`.
            texts: for each prompt, the texts of its sequences. None: no preprocessor.
            cache: as in `GenerationOutput`.
        """
        token_ids, scores, reasons = [], [], []
        for tokens, counts, row, free_length in zip(*hypotheses, self.free_length, strict=True):
            scores.append(row[row > -np.inf].tolist())
            rows = zip(tokens, counts, scores[-1], strict=False)
            token_ids.append([ids[:count].tolist() for ids, count, _ in rows])
            reasons.append([self._finish_reason(ids, False, free_length) for ids in token_ids[-1]])
        if texts is not None:
            texts = [list(row[: len(found)]) for row, found in zip(texts, scores, strict=True)]
        return GenerationOutput(texts, token_ids, [[] for _ in scores], reasons, cache, scores)

    def result(self, new, counts, cache=None, logprobs=None):
        """Returns the `Result` of this request.

        Args:
            new: integers `[B, N]`, a NumPy array: the new tokens of each sequence.
            counts: integers `[B]`, how many of them belong to the sequence.
            cache, logprobs: as in `Result`.
        """
        token_ids = self.token_ids.copy()
        for row, tokens, start, count in zip(token_ids, new, self.lengths, counts, strict=True):
            row[start : start + count] = tokens[:count]
        lengths = (self.lengths + counts).astype("int32")
        return Result(token_ids, lengths, cache, logprobs)


class Ended:
    """Ends of the sequences: the rows that have ended, and their numbers of tokens.

    Args:
        request: the `Request`.

    Attributes:
        rows: boolean [B], True for sequences that have ended at a stop token or string.
    """

    def __init__(self, request):
        self._request, self._num_tokens = request, 0
        self.rows = np.zeros(len(request.lengths), "bool")

    def after(self, new):
        """Returns True if all sequences have ended; `new` has the next tokens, [B, N]."""
        request = self._request
        self._num_tokens += new.shape[1]
        if request.stop_strings is not None:
            self.rows |= request.stop_strings.add(new)
        self.rows |= np.isin(new, request.stop_token_ids).any(axis=1)
        return bool((self.rows | (request.free_length <= self._num_tokens)).all())

    def counts(self, new):
        """Returns the number of new tokens of each sequence, `[B]`, given all of them [B, N]."""
        request = self._request
        is_stop = np.isin(new, request.stop_token_ids)
        counts = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, new.shape[1])
        if request.stop_strings is not None:
            request.stop_strings.add(new[:, request.stop_strings.num_tokens :])
            counts = np.minimum(counts, request.stop_strings.counts)
        return np.minimum(counts, request.free_length)


class Result(NamedTuple):
    """Generated tokens.

    Attributes:
        token_ids: int32 `[B, T]`, a NumPy array: prompts, new tokens, padding.
        lengths: int32 `[B]`, lengths of prompts with new tokens.
        cache: the cache after all tokens of each sequence but the last, or None.
        logprobs: the `Logprobs` of NumPy arrays `[B, N]` and `[B, N, K]`, of the new tokens of each
            sequence, or None.
        hypotheses: the `Hypotheses` of beam search if all of them are returned, else None.
    """

    token_ids: Any
    lengths: Any
    cache: Any
    logprobs: Any
    hypotheses: Any = None
