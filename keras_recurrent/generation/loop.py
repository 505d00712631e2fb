"""Prompt processing and decoding in a program of JAX or TensorFlow.

Prompts are processed up to the token before the last. Each step then takes the last token of each
sequence, whatever its length, and appends the next. A sequence ends at a stop token or at its
maximum length.
"""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_recurrent.generation.lengths import chunk_length
from keras_recurrent.generation.sampling import empty_logprobs


class Network(NamedTuple):
    """Functions of the language model that a decoding loop calls.

    Attributes:
        prefill: a function `(token_ids [B, T], padding_mask, cache) -> cache`.
        step: a function `(token_ids [B, 1], padding_mask or None, cache) -> (logits
            [B, vocabulary], cache)`.
        sample: a function `(logits, count [B], uniform [B], memory) -> (tokens [B], memory,
            logprobs)`, where `memory` is what it keeps between tokens.
        num_logprobs: as in `sampling.Features`.
    """

    prefill: Any
    step: Any
    sample: Any
    num_logprobs: int | None


class DecodingState(NamedTuple):
    """State of all sequences between two decoding steps.

    Attributes:
        done: boolean [B], True for sequences that have ended.
        count: int32 [B], number of generated tokens.
        token: integers [B, 1], the last token of each sequence, which is not in the cache yet.
        cache: the cache after all tokens before `token`.
        memory: what sampling keeps between tokens: the counts of generated tokens, or ().
    """

    done: Any
    count: Any
    token: Any
    cache: Any
    memory: Any


def initial_state(cache, token, free_length, memory):
    """Returns the `DecodingState` after the prompts.

    Args:
        cache: the cache after all tokens of the prompts but the last.
        token: integers [B, 1], the last token of each prompt.
        free_length: int32 [B], maximum number of new tokens.
        memory: what sampling keeps between tokens.
    """
    return DecodingState(free_length <= 0, ops.zeros_like(free_length), token, cache, memory)


def advance(network, state, free_length, stops, uniform, keep):
    """Generates one more token for each sequence that has not ended.

    Args:
        network: a `Network`.
        state: the `DecodingState`.
        free_length: int32 [B], maximum number of new tokens.
        stops: int32 [S], the stop tokens.
        uniform: float32 [B], random numbers, or None.
        keep: boolean, True leaves the cache of a sequence unchanged after its end.

    Returns:
        The next `DecodingState`, and the `Logprobs`, or () if there are none.
    """
    mask = ops.logical_not(state.done)[:, None] if keep else None
    logits, cache = network.step(state.token, mask, state.cache)
    token, memory, logprobs = network.sample(logits, state.count, uniform, state.memory)
    token = ops.cast(token, state.token.dtype)
    if keep:
        token = ops.where(state.done, state.token[:, 0], token)
    count = state.count + ops.cast(ops.logical_not(state.done), state.count.dtype)
    done = ops.logical_or(state.done, count >= free_length)
    done = ops.logical_or(done, ops.any(ops.equal(token[:, None], stops), axis=-1))
    return DecodingState(done, count, token[:, None], cache, memory), logprobs


def decode(network, state, free_length, stops, uniform, keep, num_tokens, ends_early):
    """Generates up to `num_tokens` tokens of each sequence.

    Args:
        network, state, free_length, stops, keep: as in `advance`.
        uniform: float32 [B, num_tokens], random numbers, or None.
        num_tokens: integer.
        ends_early: boolean, True ends the loop after the last sequence has ended. On GPUs,
            the host then waits for the loop condition in each iteration and cannot launch the next
            program ahead.

    Returns:
        The `DecodingState`, the tokens [B, num_tokens], and their `Logprobs` or ().
    """

    # `free_length` may have been lowered after the last token of a sequence.
    done = ops.logical_or(state.done, state.count >= free_length)
    state = state._replace(done=done)

    def one(state, uniform):
        return advance(network, state, free_length, stops, uniform, keep)

    def stored(buffers, values, t):
        def store(buffer, value):
            return ops.slice_update(buffer, (0, t, 0)[: buffer.ndim], value[:, None])

        return keras.tree.map_structure(store, buffers, values)

    def column(t):
        if uniform is None:
            return None
        return ops.slice(uniform, (0, t), (uniform.shape[0], 1))[:, 0]

    def continues(t, state, generated, logprobs):
        if not ends_early:
            return t < num_tokens
        return ops.logical_and(t < num_tokens, ops.logical_not(ops.all(state.done)))

    def step(t, state, generated, logprobs):
        state, new = one(state, column(t))
        generated = ops.slice_update(generated, (0, t), state.token)
        return t + 1, state, generated, stored(logprobs, new, t)

    size = state.token.shape[0], num_tokens
    generated = ops.zeros(size, state.token.dtype)
    buffers = empty_logprobs(network.num_logprobs, size)
    initial = ops.zeros((), "int32"), state, generated, buffers
    _, state, generated, logprobs = ops.while_loop(continues, step, initial)
    return state, generated, logprobs


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
