"""Iterator over generated text or tokens."""

from sys import is_finalizing
from typing import Any

import keras
import numpy as np

from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.generation.output import generation_output
from keras_recurrent.generation.sampling import Logprobs
from keras_recurrent.generation.stop_strings import StreamedText


class Stream:
    """Iterator over generated text or tokens, returned by `stream` of a language model.

    It may be left early. An exception inside a step, such as Ctrl-C, closes it. Its resources, such
    as a CUDA graph, are released by `close`, at its end or when it is garbage-collected. The
    weights of the model must not change until then.

    Args:
        steps: the `Steps` of a loop: called, they return the next token of each sequence.
        prompts: the `Prompts`.
        request: the `Request`.
        preprocessor: the preprocessor of the model, which detokenizes. None: yields tokens.
        max_length: the `max_length` of the cache.
        key: the key of the cache.
        turn: the `Turn` of a conversation, or None.
    """

    def __init__(self, steps, prompts, request, preprocessor, max_length, key, turn=None):
        self._preprocessor, self._turn = preprocessor, turn
        self._steps, self._prompts, self._request = steps, prompts, request
        self._key, self._max_length = key, max_length
        self._free_length = request.free_length
        self._new: list[list[int]] = [[] for _ in self._free_length]
        self._logprobs: list[Logprobs] = []
        self._texts = None
        if preprocessor is not None:
            strings = request.stop_strings.strings if request.stop_strings else ()
            options = strings, request.hidden_stop_tokens(preprocessor)
            self._texts = [StreamedText(preprocessor, t, *options) for t in prompts.last_token]
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
        steps = self._open_steps()
        token = steps()[:, 0]
        if steps.logprobs:
            self._logprobs.append(steps.logprobs)
        for row in np.flatnonzero(active):
            self._new[row].append(int(token[row]))
        is_stop = np.isin(token, self._request.stop_token_ids)
        self._free_length = np.where(is_stop, 0, self._free_length - active)
        output = self._format_output(token, active)
        if not (self._free_length > 0).any():
            self._final_cache = self.cache
            self.close()
        return output

    def _format_output(self, token, active):
        """Returns the new tokens as text or tokens; None if no sequence has new text.

        Args:
            token: integers [B], the new tokens.
            active: boolean [B], False for sequences that ended before this token.
        """
        if self._texts is None:
            return [int(t) if a else None for t, a in zip(token, active, strict=True)]
        ended = active & (self._free_length <= 0)
        rows = zip(self._texts, token, active, ended, strict=True)
        texts = [text.add(t, is_last) if a else "" for text, t, a, is_last in rows]
        stopped = np.array([text.is_stopped for text in self._texts]) & (self._free_length > 0)
        self._free_length = np.where(stopped, 0, self._free_length)
        self._open_steps().stop(stopped)
        if not any(texts):
            return None
        return texts[0] if self._prompts.is_single else texts

    @property
    def output(self):
        """`GenerationOutput` of all tokens so far, with new text only and without the cache."""
        texts: Any = None
        if self._texts is not None:
            texts = [text.shown for text in self._texts]
            texts = texts[0] if self._prompts.is_single else texts
        stopped = [text.is_stopped for text in self._texts or ()] or [False] * len(self._new)
        reasons = self._request.finish_reasons(self._new, stopped)
        logprobs = None
        if self._logprobs:
            arrays = self._logprobs
            logprobs = keras.tree.map_structure(lambda *x: np.concatenate(x, axis=1), *arrays)
        return generation_output(self._request.sampling.params, self._new, logprobs, texts, reasons)

    @property
    def cache(self):
        """`GenerationCache` after all tokens so far, to continue from.

        It contains all generated tokens, including those of an incomplete character.

        Raises:
            RuntimeError: the stream was closed before its end, or by an exception inside a step.
        """
        if self._final_cache is not None:
            return self._final_cache
        prompts = zip(self._prompts.all_tokens, self._new, strict=True)
        tokens = [np.concatenate((prompt, np.array(new, "int32"))) for prompt, new in prompts]
        state = self._open_steps().cache()
        conversations = None
        if self._turn is not None:
            shown = [text.shown for text in self._texts or ()]
            conversations = self._turn.conversations(self._preprocessor, tokens, shown)
        return GenerationCache(state, tokens, self._max_length, self._key, conversations)

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
