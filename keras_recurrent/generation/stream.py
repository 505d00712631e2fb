"""Iterator over generated text or tokens."""

from sys import is_finalizing

import numpy as np

from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.generation.text import IncrementalDetokenizer


class Stream:
    """Iterator over generated text or tokens, returned by `stream` of a language model.

    It may be left early. An exception inside a step, such as Ctrl-C, closes it. Its resources, such
    as a CUDA graph, are released by `close`, at its end or when it is garbage-collected. The
    weights of the model must not change until then.

    Args:
        steps: the `Steps` of a loop: called, they return the next token of each sequence.
        prompts: the `Prompts`.
        stop_token_ids: a tuple of integers, or None.
        preprocessor: the preprocessor of the model, which detokenizes. None: yields tokens.
        max_length: the `max_length` of the cache.
        key: the key of the cache.
    """

    def __init__(self, steps, prompts, stop_token_ids, preprocessor, max_length, key):
        self._steps, self._is_single, self._key = steps, prompts.is_single, key
        self._stops, self._max_length = stop_token_ids or (), max_length
        self._last, self._num_tokens = prompts.last_token, prompts.num_tokens
        self._free_length = prompts.free_length
        self._detokenizers = None
        if preprocessor is not None:
            self._detokenizers = [
                IncrementalDetokenizer(preprocessor, token) for token in prompts.last_token
            ]
        self._final_cache: GenerationCache | None = None

    def __iter__(self):
        return self

    def __next__(self):
        while (self._free_length > 0).any():
            try:
                output = self._step()
            except BaseException:
                # The steps may be one token ahead of the attributes.
                self.close()
                raise
            if output is not None:
                return output
        if self._steps is not None:  # no tokens were generated
            self._final_cache = self.cache
        self.close()
        raise StopIteration

    def _step(self):
        active = self._free_length > 0
        token = self._open_steps()()
        self._last = np.where(active, token, self._last)
        self._num_tokens = self._num_tokens + active
        self._free_length = np.where(np.isin(token, self._stops), 0, self._free_length - active)
        ended = active & (self._free_length <= 0)
        output = self._format_output(token, active, ended)
        if not (self._free_length > 0).any():
            self._final_cache = self.cache
            self.close()
        return output

    def _format_output(self, token, active, ended):
        """Returns the new tokens as text or tokens; None if no sequence has new text.

        Args:
            token: integers [B], the new tokens.
            active: boolean [B], False for sequences that ended before this token.
            ended: boolean [B], True for sequences that end with this token.
        """
        if self._detokenizers is None:
            return [int(t) if a else None for t, a in zip(token, active, strict=True)]
        arguments = zip(self._detokenizers, token, active, ended, strict=True)
        texts = [_next_text(*each) for each in arguments]
        if not any(texts):
            return None
        return texts[0] if self._is_single else texts

    @property
    def cache(self):
        """`GenerationCache` after all tokens so far, to continue from.

        It contains all generated tokens, including those of an incomplete character.

        Raises:
            RuntimeError: the stream was closed before its end, or by an exception inside a step.
        """
        if self._final_cache is not None:
            return self._final_cache
        arguments = self._last, self._num_tokens, self._max_length, self._key
        return GenerationCache(self._open_steps().cache(), *arguments)

    def close(self):
        """Ends the stream and releases its resources."""
        self._free_length = np.zeros_like(self._free_length)
        if self._steps is not None:
            self._steps.close()
        self._steps = None

    def __del__(self):
        # At interpreter shutdown there is nothing to release.
        if getattr(self, "_steps", None) is not None and not is_finalizing():
            self._steps.close()

    def _open_steps(self):
        if self._steps is None:
            raise RuntimeError(
                "The stream was closed, or an exception interrupted a step. Read its `cache` "
                "before, or create another stream."
            )
        return self._steps


def _next_text(detokenizer, token, active, ended):
    if not active:
        return ""
    return detokenizer.add(token) + (detokenizer.end() if ended else "")
