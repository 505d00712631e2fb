"""The iterator that `stream` of a language model returns."""

from sys import is_finalizing
from typing import Any

from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.generation.sequence import generation_output


class Stream:
    """Iterator over generated text or tokens, returned by `stream` of a language model.

    It may be left early. An exception inside a step, such as Ctrl-C, closes it. Its resources, such
    as a CUDA graph, are released by `close`, at its end or when it is garbage-collected. The
    weights of the model must not change until then.

    Args:
        loop: the `DecodingLoop`.
        sequences: a list of the `Sequence`s.
        texts: a list of the `StreamedText` of each sequence. If None, tokens are yielded.
        is_single: boolean, True yields one text instead of a list.
        make_cache: a function of a state, the sequences and their texts, which returns the
            `GenerationCache`.
    """

    def __init__(self, loop, sequences, texts, is_single, make_cache):
        self._loop, self._sequences, self._texts = loop, sequences, texts
        self._is_single, self._make_cache = is_single, make_cache
        self._num_yielded = [0] * len(self._sequences)
        self._final_cache: GenerationCache | None = None

    def __iter__(self):
        return self

    def __next__(self):
        while self._loop is not None:
            try:
                has_tokens = self._loop.advance()
            except BaseException:
                self._loop = None  # the step may have changed some of its tensors
                raise
            output = self._next_output() if has_tokens else None
            if not self._loop.batch.num_active:
                self._final_cache = self.cache
                self.close()
            if output is not None:
                return output
        raise StopIteration

    def _next_output(self):
        """Returns the new tokens as text or tokens; None if no sequence has new text."""
        if self._texts is not None:
            texts = [text.take() for text in self._texts]
            if not any(texts):
                return None
            return texts[0] if self._is_single else texts
        counts, self._num_yielded = self._num_yielded, [len(s.token_ids) for s in self._sequences]
        rows = zip(self._sequences, counts, self._num_yielded, strict=True)
        return [s.token_ids[-1] if count > before else None for s, before, count in rows]

    @property
    def output(self):
        """`GenerationOutput` of all tokens so far, with new text only and without the cache."""
        texts: Any = self._texts and [text.shown for text in self._texts]
        return generation_output(self._sequences, texts[0] if self._is_single else texts)

    @property
    def cache(self):
        """`GenerationCache` after all tokens so far, to continue from.

        It contains all generated tokens, including those of an incomplete character.

        Raises:
            RuntimeError: the stream was closed before its end, or by an exception inside a step.
        """
        if self._final_cache is not None:
            return self._final_cache
        if self._loop is None:
            raise RuntimeError(
                "The stream was closed, or an exception interrupted a step. Read its `cache` "
                "before, or create another stream."
            )
        texts = self._texts and [text.shown for text in self._texts]
        state = self._loop.batch.state(self._sequences)
        return self._make_cache(state, self._sequences, texts)

    def close(self):
        """Ends the stream and releases its resources."""
        if self._loop is not None:
            self._loop.batch.close()
        self._loop = None

    def __del__(self, is_finalizing=is_finalizing):  # globals may be None
        # At interpreter shutdown there is nothing to release.
        if getattr(self, "_loop", None) is not None and not is_finalizing():
            self._loop.batch.close()
