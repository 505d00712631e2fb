"""Scores and generates continuations of contexts, processing each context once."""

import numpy as np

from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.generation.batch import start_decoding
from keras_recurrent.generation.prompts import cache_max_length, pad_prompts
from keras_recurrent.generation.sampling_params import SamplingParams
from keras_recurrent.generation.sequence import Sequence
from keras_recurrent.generation.text import StreamedText, parse_token_ids
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM

TOKENS_PER_CALL = 2048  # tokens of a batch whose logits are in memory at a time


class Continuations:
    """Scores and generates continuations of contexts, in batches.

    A context that several requests share is processed once, and each continuation starts from the
    state after it. Shapes are rounded up to powers of two, so that few programs are compiled.

    Args:
        model: a language model of this package. Each call uses its current weights.
        batch_size: integer, maximum number of contexts or continuations in a batch. Memory holds as
            many states of contexts and of continuations.
        max_length: integer, maximum number of tokens processed for one answer; the oldest tokens of
            a longer context are dropped. None: no limit.

    Raises:
        TypeError: `model` is not a language model of this package.
        ValueError: a number is not an integer of at least 1.

    Example:

    >>> from keras_recurrent.continuations import Continuations
    >>> from keras_recurrent.models import GriffinCausalLM
    >>> model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> several = Continuations(model, batch_size=4)
    >>> found = several.score([([1, 100], [101, 102]), ([1, 100], [103])])
    >>> [score < 0 for score, is_greedy in found]
    [True, True]
    >>> (text,) = several.generate([[1, 100]], until=["."], max_new_tokens=3, end_token_id=2)
    >>> "." not in text and len(text) <= 3
    True
    """

    def __init__(self, model, batch_size=8, max_length=None):
        if not isinstance(model, RecurrentCausalLM):
            raise TypeError(
                "`model` must be a language model of keras_recurrent, such as "
                f"`keras_recurrent.models.GriffinCausalLM`; got {type(model).__name__}."
            )
        check_positive_integer("batch_size", batch_size)
        check_positive_integer("max_length", max_length, or_none=True)
        self.batch_size, self.max_length = batch_size, max_length
        self._preprocessor = model.preprocessor
        # A model of the same backbone that takes tokens and has its own sampler.
        self._model = type(model)(model.backbone, preprocessor=None, compile=False)
        self._model.compile(sampler="greedy")

    def score(self, requests):
        """Computes log probabilities of continuations.

        Args:
            requests: a list of pairs `(context, continuation)`, both lists of token ids. A context
                has at least one token.

        Returns:
            A list of pairs: log p(continuation | context), a float in nats, and a boolean, True if
            each token of the continuation is the most probable one. They are 0.0 and True for an
            empty continuation.

        Raises:
            ValueError: a request is not a pair of lists of token ids, a context is empty, an id is
                outside the vocabulary, or a continuation is longer than `max_length`.
        """
        requests = [self._truncate(*_check_pair(request)) for request in requests]
        numbers_of_context: dict = {}
        for number, (context, _) in enumerate(requests):
            numbers_of_context.setdefault(tuple(context), []).append(number)
        found: list = [(0.0, True)] * len(requests)
        for contexts in self._batches(numbers_of_context):
            pairs = [(row, n) for row, c in enumerate(contexts) for n in numbers_of_context[c]]
            pairs.sort(key=lambda pair: -len(requests[pair[1]][1]))
            longest = len(requests[pairs[0][1]][1])
            cache = self._prefill(contexts, longest)
            for first in range(0, len(pairs), self.batch_size):
                rows, numbers = zip(*pairs[first : first + self.batch_size], strict=True)
                scores = self._score_batch(
                    cache.select(self._pad_indices(rows)), [requests[n][1] for n in numbers]
                )
                for number, score in zip(numbers, scores, strict=True):
                    found[number] = score
        return found

    def generate(self, contexts, until, max_new_tokens, end_token_id):
        """Generates continuations greedily and returns them as text.

        Args:
            contexts: a list of lists of token ids, at least one id each.
            until: a list of stop strings; a continuation ends before the first of them.
            max_new_tokens: integer, maximum number of tokens in a continuation.
            end_token_id: integer, the token that also ends a continuation.

        Returns:
            A list of strings.

        Raises:
            ValueError: the model has no preprocessor to detokenize; a context is not a list of
                token ids or is empty; an id is outside the vocabulary; `max_new_tokens` is not an
                integer of at least 1 and below `max_length`; `until` has an empty string.
        """
        if self._preprocessor is None:
            raise ValueError(
                "`model` must have a preprocessor to detokenize the answers; it has none. Create "
                "the model with its `preprocessor`."
            )
        check_positive_integer("max_new_tokens", max_new_tokens)
        if self.max_length is not None and max_new_tokens >= self.max_length:
            raise ValueError(
                f"`max_new_tokens` must be below `max_length`, {self.max_length}, to leave room "
                f"for a context; got {max_new_tokens}."
            )
        if "" in until:
            raise ValueError(f"`until` must be non-empty strings; got {until!r}.")
        cut = [self._truncate(context, num_new=max_new_tokens)[0] for context in contexts]
        texts: dict = dict.fromkeys(map(tuple, cut))
        for batch in self._batches(texts):
            cache = self._prefill(batch, max_new_tokens)
            answers = self._generate_texts(cache, until, max_new_tokens, end_token_id)
            texts.update(zip(batch, answers, strict=False))
        return [texts[tuple(context)] for context in cut]

    def _truncate(self, context, continuation=(), num_new=None):
        """Validates a request and drops the oldest tokens beyond `max_length`.

        num_new: integer, number of processed tokens after the context. None: len(continuation) - 1.
        """
        vocabulary_size = self._model.backbone.vocabulary_size
        kinds = "a list of token ids, at least one"
        context = parse_token_ids("context", context, vocabulary_size, kinds, 1).tolist()
        continuation = parse_token_ids("continuation", continuation, vocabulary_size).tolist()
        if self.max_length is not None:
            # The last token of a continuation is not processed.
            num_new = max(len(continuation) - 1, 0) if num_new is None else num_new
            if num_new >= self.max_length:
                raise ValueError(
                    f"`max_length` is {self.max_length} tokens, and a continuation has "
                    f"{len(continuation)}. Pass a larger `max_length`."
                )
            context = context[-(self.max_length - num_new) :]
        return context, continuation

    def _batches(self, contexts):
        """Yields lists of contexts, the longest first, so that a lack of memory shows early."""
        order = sorted(contexts, key=len, reverse=True)
        for first in range(0, len(order), self.batch_size):
            yield order[first : first + self.batch_size]

    def _pad_indices(self, rows):
        """Repeats the last of `rows` up to a power of two, at most `batch_size`."""
        rows = list(rows)
        size = min(_power_of_two(len(rows)), self.batch_size)
        return rows + rows[-1:] * (size - len(rows))

    def _prefill(self, contexts, num_new):
        """Returns the cache after contexts, padded with repeats, for `num_new` more tokens."""
        longest, rows = len(contexts[0]), self._pad_indices(range(len(contexts)))
        prompts = pad_prompts([contexts[row] for row in rows], longest)
        limit = cache_max_length(self._model, longest + num_new, keep=True)
        return self._model.prefill(prompts, limit)

    def _score_batch(self, cache, continuations):
        rows, width = cache.batch_size, _power_of_two(len(continuations[0]))
        lengths = np.zeros((rows, 1), int)
        inputs, targets = (np.zeros((rows, width), "int32") for _ in range(2))
        inputs[:, 0] = cache.last_token
        for row, new in enumerate(continuations):
            lengths[row], targets[row, : len(new)] = len(new), new
            inputs[row, 1 : len(new)] = new[:-1]
        real = np.arange(width) < lengths
        state, total, greedy = cache.state, np.zeros(rows), np.ones(rows, bool)
        size = max(1, TOKENS_PER_CALL // rows)
        for first in range(0, width, size):
            part = slice(first, first + size)
            if not real[:, part].any():
                break
            arrays = inputs[:, part], targets[:, part], real[:, part]
            loss, best, state = self._model._programs().score(*arrays, state)
            total -= np.where(real[:, part], loss.astype("float64"), 0.0).sum(axis=1)
            greedy &= (best | ~real[:, part]).all(axis=1)
        found = zip(total.tolist(), greedy.tolist(), strict=True)
        return [score for score, _ in zip(found, continuations, strict=False)]

    def _generate_texts(self, cache, until, max_new_tokens, end_token_id):
        texts = [
            StreamedText(self._preprocessor, token, until, [end_token_id])
            for token in cache.last_token
        ]
        options = SamplingParams(temperature=0), None, max_new_tokens, [end_token_id]
        pairs = zip(cache.token_ids, texts, strict=True)
        sequences = [Sequence(ids, *options, text.listen) for ids, text in pairs]
        programs = self._model._programs()
        loop = start_decoding(programs, sequences, lambda batch: cache.state)
        while loop.advance():
            pass
        loop.batch.close()
        return [text.shown for text in texts]


def _check_pair(request):
    if isinstance(request, (list, tuple)) and len(request) == 2:
        return request
    raise ValueError(
        f"`requests` must be pairs of a context and a continuation; got {request!r} among them."
    )


def _power_of_two(number):
    return 1 << max(number - 1, 0).bit_length()
