"""Prompt processing and decoding in a program of JAX or TensorFlow.

Prompts are processed up to the token before the last. Each step then takes the last token of each
sequence, whatever its length, and appends the next. A sequence ends at a stop token or at its
maximum length.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_recurrent.generation.lengths import chunk_length


class Network(NamedTuple):
    """Functions of the language model that a decoding loop calls.

    Attributes:
        prefill: a function `(token_ids [B, T], padding_mask, cache) -> cache`.
        step: a function `(token_ids [B, 1], padding_mask or None, cache) -> (logits
            [B, vocabulary], cache)`.
        sample: a function `(logits [B, vocabulary], seeds) -> (tokens [B], seeds)`, where seeds are
            the states of random number generators.
    """

    prefill: Any
    step: Any
    sample: Any


class DecodingState(NamedTuple):
    """State of all sequences between two decoding steps.

    Attributes:
        done: boolean [B], True for sequences that have ended.
        count: int32 [B], number of generated tokens.
        token: integers [B, 1], the last token of each sequence, which is not in the cache yet.
        cache: the cache after all tokens before `token`.
        seeds: the states of random number generators.
    """

    done: Any
    count: Any
    token: Any
    cache: Any
    seeds: Any


def initial_state(cache, token, free_length, seeds):
    """Returns the `DecodingState` after the prompts.

    Args:
        cache: the cache after all tokens of the prompts but the last.
        token: integers [B, 1], the last token of each prompt.
        free_length: int32 [B], maximum number of new tokens.
        seeds: the states of random number generators.
    """
    return DecodingState(free_length <= 0, ops.zeros_like(free_length), token, cache, seeds)


def advance(network, state, free_length, stop_token_ids, keep):
    """Generates one more token for each sequence that has not ended.

    keep: boolean, True leaves the cache of a sequence unchanged after its end.
    """
    mask = ops.logical_not(state.done)[:, None] if keep else None
    logits, cache = network.step(state.token, mask, state.cache)
    token, seeds = network.sample(logits, state.seeds)
    token = ops.cast(token, state.token.dtype)
    if keep:
        token = ops.where(state.done, state.token[:, 0], token)
    count = state.count + ops.cast(ops.logical_not(state.done), state.count.dtype)
    done = ops.logical_or(state.done, count >= free_length)
    for stop in stop_token_ids or ():
        done = ops.logical_or(done, ops.equal(token, stop))
    return DecodingState(done, count, token[:, None], cache, seeds)


def generate(network, cache, token_ids, lengths, max_length, stop_token_ids, seeds, keep):
    """Processes prompts and generates tokens after them.

    Args:
        network: a `Network`.
        cache: the cache before these tokens.
        token_ids: integers `[B, T]`, prompts followed by padding.
        lengths: int32 `[B]`, lengths of the prompts, at least 1.
        max_length: int32, maximum number of tokens of a sequence, at most T.
        stop_token_ids: a tuple of integers, or None.
        seeds: the states of random number generators.
        keep: boolean, True if the final cache is returned.

    Returns:
        `(token_ids [B, T], lengths [B], seeds)` and, with `keep`, the cache after all tokens of
        each sequence but the last.
    """
    cache = prefill(network, cache, token_ids, lengths - 1)
    last = ops.take_along_axis(token_ids, lengths[:, None] - 1, axis=1)
    free_length = max_length - lengths

    def any_active(t, generated, state):
        return ops.logical_not(ops.all(state.done))

    def step(t, generated, state):
        state = advance(network, state, free_length, stop_token_ids, keep)
        return t + 1, ops.slice_update(generated, (0, t), state.token), state

    state = initial_state(cache, last, free_length, seeds)
    initial = ops.zeros((), "int32"), ops.zeros_like(token_ids), state
    _, generated, state = ops.while_loop(any_active, step, initial)
    index = ops.arange(token_ids.shape[1], dtype="int32") - lengths[:, None]
    new = ops.logical_and(index >= 0, index < state.count[:, None])
    generated = ops.take_along_axis(generated, ops.maximum(index, 0), axis=1)
    results = ops.where(new, generated, token_ids), lengths + state.count, state.seeds
    return (*results, state.cache) if keep else results


def prefill(network, cache, token_ids, lengths):
    """Returns the cache after the first `lengths` [B] tokens of each sequence."""
    size = chunk_length(*token_ids.shape)
    longest, positions = ops.max(lengths), ops.arange(size, dtype="int32")

    def any_left(start, cache):
        return start < longest

    def step(start, cache):
        tokens = ops.slice(token_ids, (0, start), (token_ids.shape[0], size))
        return start + size, network.prefill(tokens, start + positions < lengths[:, None], cache)

    return ops.while_loop(any_left, step, (ops.zeros((), "int32"), cache))[1]
