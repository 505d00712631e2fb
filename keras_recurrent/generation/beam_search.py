"""Beam search over decoding steps, on all backends.

A search keeps N running sequences of each prompt, and the N best sequences that have ended. Prompts
are independent of each other: each is processed up to its last token before the search begins.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

EARLY_STOPPING = False, True, "never"


class Hypotheses(NamedTuple):
    """Sequences that have ended, the best first.

    Attributes:
        tokens: int32 `[B, N, T]`, the new tokens, followed by padding.
        counts: int32 `[B, N]`, number of new tokens.
        scores: float32 `[B, N]`, as in `BeamSampler`. -inf: fewer than N sequences have ended.
    """

    tokens: Any
    counts: Any
    scores: Any


class SearchState(NamedTuple):
    """State of the searches between two steps.

    Attributes:
        count: int32, number of new tokens of the running sequences.
        done: boolean [B], True for prompts whose search has ended.
        token: int32 [B * N, 1], the last token of each running sequence.
        cache: the cache before these tokens, with the N sequences of a prompt adjacent.
        tokens: int32 [B, N, T], the new tokens of the running sequences.
        scores: float32 [B, N], sums of their log probabilities, in descending order. -inf: there
            are fewer than N sequences.
        ended: the `Hypotheses`.
    """

    count: Any
    done: Any
    token: Any
    cache: Any
    tokens: Any
    scores: Any
    ended: Hypotheses


def initial_state(cache, token, free_length, num_beams, size):
    """Returns the `SearchState` after the prompts; arguments as in `search`."""
    batch_size = token.shape[0]
    cache, token = keras.tree.map_structure(
        lambda x: ops.repeat(x, num_beams, axis=0), (cache, ops.cast(token, "int32"))
    )
    tokens = ops.zeros((batch_size, num_beams, size), "int32")
    counts = ops.zeros((batch_size, num_beams), "int32")
    is_first = ops.equal(ops.arange(num_beams, dtype="int32"), 0)
    done = free_length <= 0
    # The N copies of a prompt are one sequence.
    scores = ops.where(is_first, _float(0), _float(-np.inf))
    scores = ops.broadcast_to(scores, (batch_size, num_beams))
    # A prompt without free length is its own best sequence.
    ended = Hypotheses(tokens, counts, ops.where(done[:, None], scores, _float(-np.inf)))
    return SearchState(ops.zeros((), "int32"), done, token, cache, tokens, scores, ended)


def advance(step, state, free_length, stops, length_penalty, early_stopping):
    """Returns the `SearchState` after one more token; arguments as in `search`."""
    batch_size, num_beams, size = state.tokens.shape
    logits, cache = step(state.token, None, state.cache)
    vocabulary_size = logits.shape[-1]
    log_probabilities = ops.log_softmax(ops.cast(logits, "float32"), axis=-1)
    log_probabilities = ops.reshape(log_probabilities, (batch_size, num_beams, vocabulary_size))
    scores = state.scores[:, :, None] + log_probabilities
    count, column = state.count + 1, ops.equal(ops.arange(size, dtype="int32"), state.count)

    def extend(index):
        """Returns parents, last tokens and all tokens of sequences `beam * V + token`, [B, N]."""
        parents, token = index // vocabulary_size, index % vocabulary_size
        tokens = ops.take_along_axis(state.tokens, parents[:, :, None], axis=1)
        return parents, token, ops.where(column, token[:, :, None], tokens)

    # The N best sequences that do not end at a stop token continue.
    ids = ops.arange(vocabulary_size, dtype="int32")
    is_stop = ops.any(ops.equal(ids, stops[:, None]), axis=0)
    others = ops.where(is_stop, _float(-np.inf), scores)
    others = ops.reshape(others, (batch_size, num_beams * vocabulary_size))
    running_scores, running = _top_k(others, num_beams)
    parents, token, tokens = extend(running)

    # Stop tokens end those of the N best sequences that have one.
    known = ops.maximum(stops, 0)
    stop_scores = ops.where(stops >= 0, ops.take(scores, known, axis=-1), _float(-np.inf))
    beams = vocabulary_size * ops.arange(num_beams, dtype="int32")
    shape = batch_size, num_beams * stops.shape[0]
    with_stop = ops.broadcast_to(ops.reshape(beams[:, None] + known, (1, shape[1])), shape)
    candidates = ops.concatenate((running_scores, ops.reshape(stop_scores, shape)), axis=1)
    best_scores, best = _top_k(candidates, num_beams)
    index = ops.take_along_axis(ops.concatenate((running, with_stop), axis=1), best, axis=1)
    ends = ops.logical_or(best >= num_beams, (count >= free_length)[:, None])
    ends = ops.logical_and(ends, ops.logical_not(state.done)[:, None])
    length_scores = best_scores / _weight(count, length_penalty)
    new = Hypotheses(
        extend(index)[2],
        ops.broadcast_to(count, (batch_size, num_beams)),
        ops.where(ends, length_scores, _float(-np.inf)),
    )
    ended = _best_of(state.ended, new)

    # A running sequence cannot exceed this score, by the rule of `early_stopping`.
    at_once, never = (ops.equal(early_stopping, EARLY_STOPPING.index(x)) for x in (True, "never"))
    length = ops.where(ops.logical_and(never, length_penalty > 0), free_length, count)
    bound = running_scores[:, 0] / _weight(length, length_penalty)
    is_over = ops.logical_or(at_once, bound <= ended.scores[:, -1])
    is_over = ops.logical_and(is_over, ops.all(ended.scores > -np.inf, axis=1))
    is_over = ops.logical_or(is_over, ops.equal(running_scores[:, 0], -np.inf))
    is_over = ops.logical_or(is_over, count >= free_length)

    first = num_beams * ops.arange(batch_size, dtype="int32")
    rows = ops.reshape(first[:, None] + parents, (-1,))
    return SearchState(
        count,
        ops.logical_or(state.done, is_over),
        ops.reshape(token, (-1, 1)),
        keras.tree.map_structure(lambda x: ops.take(x, rows, axis=0), cache),
        tokens,
        running_scores,
        ended,
    )


def search(step, cache, token, free_length, stops, length_penalty, early_stopping, num_beams, size):
    """Searches for the best sequences after each prompt.

    Args:
        step: that of a `loop.Network`, for B * N sequences.
        cache: the cache after all tokens of the prompts but the last.
        token: integers [B, 1], the last token of each prompt.
        free_length: int32 [B], maximum number of new tokens.
        stops: int32 [S], the stop tokens, each once; -1 is ignored.
        length_penalty: float32, that of the `BeamSampler`.
        early_stopping: int32, index in `EARLY_STOPPING` of that of the sampler.
        num_beams: integer, that of the sampler.
        size: integer, at least the maximum of `free_length`.

    Returns:
        The `Hypotheses`.
    """

    def any_active(state):
        return ops.logical_not(ops.all(state.done))

    def one(state):
        return (advance(step, state, free_length, stops, length_penalty, early_stopping),)

    state = initial_state(cache, token, free_length, num_beams, size)
    return ops.while_loop(any_active, one, (state,))[0].ended


def options_of(sampler):
    """Returns `length_penalty` and `early_stopping` of a `BeamSampler` as `search` takes them."""
    early_stopping = EARLY_STOPPING.index(sampler.early_stopping)
    return np.float32(sampler.length_penalty), np.int32(early_stopping)


def search_request(step, cache, request, sampler):
    """Returns the `Hypotheses` of a `Request`, NumPy arrays, by single steps.

    step, cache: as in `search`.
    sampler: the `BeamSampler`.
    """
    free_length = request.free_length
    stops = np.array(request.stop_token_ids, "int32")
    arrays = request.last_token, free_length, stops, *options_of(sampler)
    options = *map(ops.convert_to_tensor, arrays), sampler.num_beams, int(free_length.max())
    found = search(step, cache, *options)
    return keras.tree.map_structure(ops.convert_to_numpy, found)


def _best_of(*hypotheses):
    """Returns the N best of two `Hypotheses`."""
    arrays = zip(*hypotheses, strict=True)
    tokens, counts, scores = (ops.concatenate(pair, axis=1) for pair in arrays)
    scores, order = _top_k(scores, hypotheses[0].scores.shape[1])
    tokens = ops.take_along_axis(tokens, order[:, :, None], axis=1)
    return Hypotheses(tokens, ops.take_along_axis(counts, order, axis=1), scores)


def _top_k(scores, k):
    scores, index = ops.top_k(scores, k, sorted=True)
    return scores, ops.cast(index, "int32")


def _weight(length, length_penalty):
    return ops.power(ops.cast(length, "float32"), length_penalty)


def _float(value):
    return ops.convert_to_tensor(value, "float32")
