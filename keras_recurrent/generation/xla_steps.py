"""Decoding by programs of a few tokens on JAX and TensorFlow, one program ahead of the host."""

from typing import Any

import keras
import numpy as np

from keras_recurrent.devices.jax_processes import begin_gathering, gather_to_numpy

# Between two copies of the state, or two searches for stop strings; a multiple of the tokens of a
# block.
TOKENS_PER_GROUP = 16


class Steps:
    """Function that returns the next token of each sequence.

    A program computes a block of tokens. On JAX it overwrites the state, which is copied before
    each group of blocks. `limit` and `cache` compute the state after earlier tokens again, from a
    copy and with the same random numbers.

    Args:
        call: the `xla_programs.Call`.
        decode: a function of a `loop.DecodingState`, which may be overwritten, the random numbers
            of a block, the `free_length` and the number of tokens N of a block, which returns the
            next state, the tokens [B, N], and their `Logprobs` or ().
        copy: a function that returns a copy of a `loop.DecodingState`.
        finish: a function that returns the cache of such a state as the backbone takes it.
        state: the `loop.DecodingState` after the prompts.
        num_tokens: integer, number of tokens in a block.
        keep: boolean, True if `stop`, `limit` or `cache` is called.

    Attributes:
        logprobs: the `Logprobs` of the latest tokens, or ().
    """

    def __init__(self, call, decode, copy, finish, state, num_tokens, keep):
        self._call, self._decode, self._copy, self._finish = call, decode, copy, finish
        self._num_tokens, self._keep, self._state = num_tokens, keep, copy(state)
        self._starts: dict[int, Any] = {}  # states, by the number of tokens before a group
        self._uniform: dict[int, Any] = {}  # random numbers, by the number of tokens before a block
        # Numbers of tokens of each sequence: in launched blocks, in blocks that the host has, and
        # in the latest of these but not returned.
        self._num_launched = self._num_fetched = self._num_waiting = 0
        self._launch()

    def _launch(self):
        """Starts to compute the next block, unless all sequences have their maximum length."""
        self._ahead: Any = None
        position = self._num_launched
        if position >= self._call.limits.max():
            return
        if self._keep and position % TOKENS_PER_GROUP == 0:
            self._starts[position] = self._copy(self._state)
        if position not in self._uniform:
            self._uniform[position] = self._call.uniform(self._num_tokens, self._num_tokens)
        self._state, *self._ahead = self._advance(self._state, position, self._call.free_length)
        self._num_launched += self._num_tokens
        begin_gathering(self._ahead)

    def _advance(self, state, position, free_length):
        return self._decode(state, self._uniform[position], free_length, self._num_tokens)

    def block(self):
        """Returns the next tokens [B, N], a NumPy array; an ended sequence repeats its last one."""
        tokens, logprobs = self._ahead
        self._forget(self._num_fetched)
        self._num_fetched = self._num_launched
        # Launched before the host waits for the device. If all sequences have just ended at stop
        # tokens, this block changes nothing.
        self._launch()
        self.logprobs = keras.tree.map_structure(gather_to_numpy, logprobs)
        return gather_to_numpy(tokens)

    def _forget(self, position):
        """Drops what only the states before `position` tokens need."""
        first = position - position % TOKENS_PER_GROUP
        for kept in (self._starts, self._uniform):
            for key in [key for key in kept if key < first]:
                del kept[key]

    def __call__(self):
        """Returns the next tokens [B, 1], as `block`."""
        if not self._num_waiting:
            tokens = self.block()
            self._block, self._num_waiting = (tokens, self.logprobs), self._num_tokens
        column = self._num_tokens - self._num_waiting
        self._num_waiting -= 1
        token, self.logprobs = keras.tree.map_structure(
            lambda array: array[:, column : column + 1], self._block
        )
        return token

    def stop(self, rows):
        """Ends sequences after the latest tokens.

        rows: boolean [B], a NumPy array, True for sequences that end.
        """
        num_tokens = self._num_fetched - self._num_waiting
        self.limit(np.where(rows, num_tokens, self._call.limits))

    def limit(self, counts):
        """Reduces the maximum numbers of new tokens.

        counts: int32 [B], not less than the number of tokens before the latest block.
        """
        lower = counts < self._call.limits
        if not lower.any():
            return
        first = int(counts[lower].min())
        self._call.limit(counts)
        if first < self._num_launched:
            self._state = self._replay(first, self._num_fetched, self._call.free_length)
            self._num_launched = self._num_fetched
            self._launch()

    def _replay(self, first, end, free_length):
        """Returns the state after `end` tokens, computed from a copy at `first` or before."""
        first -= first % TOKENS_PER_GROUP
        state = self._copy(self._starts[first])
        for position in range(first, end, self._num_tokens):
            state, *_ = self._advance(state, position, free_length)
        return state

    def cache(self):
        """Returns the cache after all tokens of each sequence but the last."""
        end = self._num_fetched - self._num_waiting
        state = self._state
        if gather_to_numpy(state.count).max() > end:
            state = self._replay(end, end, self._call.limited(end))
        return self._finish(state.cache)

    def close(self):
        """Drops the arrays."""
        self._ahead = self._state = None
        self._starts.clear()
