"""Beam search over decoding steps, on all backends, and its sampler.

A search keeps N running sequences of each prompt, and the N best sequences that have ended. Prompts
are independent of each other: each is processed up to its last token before the search begins.
"""

from typing import Any, NamedTuple

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_recurrent.checks.arguments import check_boolean, check_positive_integer, is_finite_number

EARLY_STOPPING = False, True, "never"


@keras.saving.register_keras_serializable(package="keras_recurrent")
class BeamSampler(keras_hub.samplers.Sampler):
    """Beam search: approximates the most probable sequence by keeping the best candidates.

    Each step extends the `num_beams` active beams of a prompt by one token and ranks the
    candidates. A candidate among the best `num_beams` that ends, at a stop token or at the maximum
    length, is finished and stored with its score. The best unfinished candidates become the new
    beams. The search returns the finished sequence with the highest score. Each prompt of a batch
    gets the result that it gets alone, whatever the lengths of the others.

    The score of a sequence is `sum(log p) / n ** length_penalty`, in float32, where the sum is over
    its n new tokens including the stop token. Scores and the end of a search are those of beam
    search in transformers.

    `compile(sampler="beam")` uses this class with its defaults, and KerasHub's `BeamSampler` is
    converted to it.

    Args:
        num_beams: integer, number of sequences that are kept for each prompt. Time and memory of a
            step are those of a batch `num_beams` times as large.
        length_penalty: number. Above 0, longer sequences get higher scores, since logarithms of
            probabilities are negative; below 0, shorter ones. 0: the scores are `sum(log p)`.
        early_stopping: stopping rule, once `num_beams` sequences are finished. True: stop at once.
            False: stop when the current score of the best active beam is at most the lowest
            finished score. `"never"`: stop when no active beam can exceed it at any length.
        return_all_beams: boolean, True makes `generate` return a `GenerationOutput` of all
            finished sequences of each prompt with their `scores`, the best first: `num_beams`, or
            fewer if there are no more.

    Raises:
        ValueError: an argument is out of range.

    Example: the two best continuations.

    >>> from keras_recurrent.models import GriffinCausalLM
    >>> from keras_recurrent.samplers import BeamSampler
    >>> model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> model.compile(sampler=BeamSampler(num_beams=2, return_all_beams=True))
    >>> output = model.generate(["All happy", "To be"], max_new_tokens=4)
    >>> [len(texts) for texts in output.texts], output.scores[0][0] > output.scores[0][1]
    ([2, 2], True)
    """

    def __init__(
        self, num_beams=5, *, length_penalty=1.0, early_stopping=False, return_all_beams=False
    ):
        super().__init__()
        check_positive_integer("num_beams", num_beams)
        if not is_finite_number(length_penalty):
            raise ValueError(f"`length_penalty` must be a finite number; got {length_penalty!r}.")
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise ValueError(
                f'`early_stopping` must be True, False or "never"; got {early_stopping!r}.'
            )
        check_boolean("return_all_beams", return_all_beams)
        self.num_beams, self.length_penalty = int(num_beams), float(length_penalty)
        self.early_stopping, self.return_all_beams = early_stopping, bool(return_all_beams)

    def __call__(self, *args, **kwargs):
        raise ValueError(
            "`keras_recurrent.samplers.BeamSampler` works in `generate` of the language models of "
            "keras_recurrent. For other models, use `keras_hub.samplers.BeamSampler`."
        )

    def get_config(self):
        names = "num_beams", "length_penalty", "early_stopping", "return_all_beams"
        return {name: getattr(self, name) for name in names}


def convert_beam_sampler(sampler):
    """Returns KerasHub's `BeamSampler` as a `BeamSampler`, and other samplers unchanged.

    Raises:
        ValueError: the sampler has a `temperature`, or is of a subclass.
    """
    if not isinstance(sampler, keras_hub.samplers.BeamSampler):
        return sampler
    if type(sampler) is not keras_hub.samplers.BeamSampler:
        raise ValueError(
            f"`sampler` must not be of a subclass of KerasHub's BeamSampler; got a "
            f"{type(sampler).__name__}. Use `keras_recurrent.samplers.BeamSampler`."
        )
    if sampler.temperature != 1:
        raise ValueError(
            "`sampler`: `temperature` of BeamSampler must be 1, since beam search compares the "
            f"probabilities of the model; got {sampler.temperature!r}. Leave it out."
        )
    return BeamSampler(sampler.num_beams, return_all_beams=sampler.return_all_beams)


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


def initial_state(cache, token, remaining_tokens, num_beams, size):
    """Returns the `SearchState` after the prompts; arguments as in `search`."""
    batch_size = token.shape[0]
    cache, token = keras.tree.map_structure(
        lambda x: ops.repeat(x, num_beams, axis=0), (cache, ops.cast(token, "int32"))
    )
    tokens = ops.zeros((batch_size, num_beams, size), "int32")
    counts = ops.zeros((batch_size, num_beams), "int32")
    is_first = ops.equal(ops.arange(num_beams, dtype="int32"), 0)
    done = remaining_tokens <= 0
    # The N copies of a prompt are one sequence.
    scores = ops.where(is_first, _float(0), _float(-np.inf))
    scores = ops.broadcast_to(scores, (batch_size, num_beams))
    # A prompt without remaining tokens is its own best sequence.
    ended = Hypotheses(tokens, counts, ops.where(done[:, None], scores, _float(-np.inf)))
    return SearchState(ops.zeros((), "int32"), done, token, cache, tokens, scores, ended)


def advance(step, state, remaining_tokens, stops, length_penalty, early_stopping):
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
    ends = ops.logical_or(best >= num_beams, (count >= remaining_tokens)[:, None])
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
    length = ops.where(ops.logical_and(never, length_penalty > 0), remaining_tokens, count)
    bound = running_scores[:, 0] / _weight(length, length_penalty)
    is_over = ops.logical_or(at_once, bound <= ended.scores[:, -1])
    is_over = ops.logical_and(is_over, ops.all(ended.scores > -np.inf, axis=1))
    is_over = ops.logical_or(is_over, ops.equal(running_scores[:, 0], -np.inf))
    is_over = ops.logical_or(is_over, count >= remaining_tokens)

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


def search(
    step, cache, token, remaining_tokens, stops, length_penalty, early_stopping, num_beams, size
):
    """Searches for the best sequences after each prompt.

    Args:
        step: a function `(token, mask, cache) -> (logits, cache)`, for B * N sequences.
        cache: the cache after all tokens of the prompts but the last.
        token: integers [B, 1], the last token of each prompt.
        remaining_tokens: int32 [B], maximum number of new tokens.
        stops: int32 [S], the stop tokens, each once; -1 is ignored.
        length_penalty: float32, that of the `BeamSampler`.
        early_stopping: int32, index in `EARLY_STOPPING` of that of the sampler.
        num_beams: integer, that of the sampler.
        size: integer, at least the maximum of `remaining_tokens`.

    Returns:
        The `Hypotheses`.
    """

    def any_active(state):
        return ops.logical_not(ops.all(state.done))

    def one(state):
        return (advance(step, state, remaining_tokens, stops, length_penalty, early_stopping),)

    state = initial_state(cache, token, remaining_tokens, num_beams, size)
    return ops.while_loop(any_active, one, (state,))[0].ended


def search_beams(programs, cache, sequences, sampler):
    """Returns a list of the best sequences of each prompt, the best first: `Sequence`s with scores.

    cache: the cache before the last token of each prompt. None: no prompt has new tokens.
    sequences: a list of the `Sequence` of each prompt, with the same stop tokens.
    """
    remaining_tokens = np.array([s.max_new_tokens for s in sequences], "int32")
    if not remaining_tokens.any():
        return [[s.copy([], score=0.0)] for s in sequences]
    inputs = (
        np.array([[s.prompt[-1]] for s in sequences], "int32"),
        remaining_tokens,
        np.array(sorted(sequences[0].stop_token_ids), "int32"),
        np.float32(sampler.length_penalty),
        np.int32(EARLY_STOPPING.index(sampler.early_stopping)),
    )
    found, beams = programs.search(cache, inputs, sampler.num_beams), []
    for sequence, *arrays in zip(sequences, *found, strict=True):
        rows = zip(*(array.tolist() for array in arrays), strict=True)
        ended = [row for row in rows if row[-1] != -np.inf]
        beams.append([sequence.copy(ids[:count], score) for ids, count, score in ended])
    return beams


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
