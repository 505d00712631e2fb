"""Sequence of a prompt and its new tokens, with the rules for its end."""

from typing import Any

import numpy as np

from keras_recurrent.generation.output import token_logprobs

LARGEST_UNIFORM = np.float32(1 - 2**-23)  # its product with a sum is below the sum in float32


class Sequence:
    """Prompt, options and new tokens of one answer, as token ids; text is not part of it.

    Args:
        prompt: int32 array, all tokens so far, at least one.
        params: the `SamplingParams`.
        seed: a `numpy.random.SeedSequence`.
        max_new_tokens: integer.
        stop_token_ids: a tuple of integers, which may be empty.
        listener: a function of this sequence, which is called after each new token and by `end`.
            It may call `stop`. None: no function.

    Attributes:
        token_ids: a list of integers, the new tokens.
        logprobs: a list of the `TokenLogprobs` of the new tokens; empty without `params.logprobs`.
        finish_reason: `"stop"` after a stop token or stop string, `"length"` after the maximum
            number of tokens, another reason after `end`, or None.
        num_launched: integer, number of new tokens whose steps were launched.
    """

    def __init__(self, prompt, params, seed, max_new_tokens, stop_token_ids=(), listener=None):
        self.prompt, self.params, self.max_new_tokens = prompt, params, max_new_tokens
        self.stop_token_ids, self._listener = frozenset(stop_token_ids), listener
        self._generator: Any = None
        if not params.is_greedy:
            self._generator = np.random.Generator(np.random.Philox(seed))
        self.token_ids: list[int] = []
        self.logprobs: list = []
        self.finish_reason: str | None = None if max_new_tokens else "length"
        self.num_launched = 0

    @property
    def remaining_tokens(self):
        """Maximum number of further tokens."""
        return self.max_new_tokens - len(self.token_ids)

    @property
    def ends_on_device(self):
        """True if the sequence has ended on the device: after a stop token or the last token."""
        is_stopped = bool(self.token_ids) and self.token_ids[-1] in self.stop_token_ids
        return is_stopped or not self.remaining_tokens

    def uniform(self, count):
        """Returns random numbers for the next tokens, float32 `[count]`; 0 if greedy."""
        if self._generator is None:
            return 0
        return np.minimum(self._generator.random(count, "float32"), LARGEST_UNIFORM)

    def add(self, token, logprobs=None):
        """Appends a token, after which the sequence may have ended.

        Args:
            token: integer.
            logprobs: its `Logprobs`, a number and two NumPy arrays [K], or None.
        """
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(token_logprobs(self.params, token, logprobs))
        if token in self.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_new_tokens:
            self.finish_reason = "length"
        self._notify()

    def with_tokens(self, token_ids):
        """Returns a sequence of this prompt with a list of new tokens; it may have ended."""
        options = self.params, None, self.max_new_tokens, self.stop_token_ids
        sequence = Sequence(self.prompt, *options)
        for token in token_ids:
            sequence.add(token)
        return sequence

    def stop(self, num_tokens):
        """Ends the sequence after `num_tokens` new tokens, which complete a stop string."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]
        self.finish_reason = "stop"

    def end(self, reason):
        """Ends the sequence for a reason from outside, such as `"timeout"`."""
        self.finish_reason = reason
        self._notify()

    def _notify(self):
        """Calls the listener after a new token or the end."""
        if self._listener is not None:
            self._listener(self)
