"""The decoding loop of `generate`, `stream` and the engine, and the iterator of `stream`."""

import functools
from sys import is_finalizing
from typing import Any

import keras

from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.generation.sampling import Logprobs
from keras_recurrent.generation.sequence import generation_output

BackendBatch: Any
Programs: Any
if keras.config.backend() == "torch":
    from keras_recurrent.generation.torch.programs import Programs
    from keras_recurrent.generation.torch_batch import TorchBatch as BackendBatch
elif keras.config.backend() == "jax":
    from keras_recurrent.generation.xla_batch import JaxBatch as BackendBatch
    from keras_recurrent.generation.xla_programs import Programs
else:
    from keras_recurrent.generation.xla_batch import XlaBatch as BackendBatch
    from keras_recurrent.generation.xla_programs import Programs

__all__ = ["BackendBatch", "DecodingLoop", "Programs", "start_decoding"]


class DecodingLoop:
    """Decodes the sequences of a batch until they end.

    Args:
        batch: the `Batch`.

    Attributes:
        batch: as above.
        num_tokens: integer, number of new tokens of all sequences so far.
    """

    def __init__(self, batch):
        self.batch, self.num_tokens = batch, 0
        self._launched = None  # slots and results of the latest step, until it is fetched
        self._columns = iter(())  # slots, tokens and log probabilities on the host

    def advance(self):
        """Processes the next token of each sequence; returns False if all have ended.

        If the batch runs ahead, the device computes the next step while the host processes the
        tokens of the previous one, unless the next step depends on them.
        """
        if not self.batch.active_slots:
            return False
        column = next(self._columns, None)
        if column is None:
            launched = self._launched or self.batch.step()
            runs_ahead = self.batch.runs_ahead and not self.batch.needs_tokens
            self._launched = self.batch.step() if runs_ahead and self.batch.has_work else None
            self._columns = _columns(*launched)
            column = next(self._columns)
        self._process(*column)
        return True

    def _process(self, slots, tokens, logprobs):
        """Passes the tokens [B] and `Logprobs` of a column to the sequences that have not ended."""
        ended = []
        for slot, sequence in slots:
            if sequence.finish_reason is not None:
                continue
            row = None
            if logprobs and sequence.params.logprobs is not None:
                row = Logprobs(*(array[slot] for array in logprobs))
            self.num_tokens += 1
            sequence.add(tokens[slot], row)
            if sequence.finish_reason is not None:
                ended.append(sequence)
        self._deliver()
        for sequence in ended:  # last, so that no token waits for the removal
            self._end(sequence)

    def _deliver(self):
        """Called after the tokens of a step; listeners have them already."""

    def _end(self, sequence):
        self.batch.remove(sequence)


def _columns(slots, results):
    """Waits for a step; yields slots, tokens [B] and `Logprobs` for each of its positions."""
    tokens, logprobs = results()
    for t, column in enumerate(tokens.T.tolist()):
        yield slots, column, logprobs and Logprobs(*(array[:, t] for array in logprobs))


def start_decoding(model, programs, sequences, process, keep=False, reads_tokens=False):
    """Returns the `DecodingLoop` of the sequences of one call of `generate` or `stream`.

    Args:
        model: the language model.
        programs: its `Programs`.
        sequences: a list of the `Sequence`s.
        process: a function of `prepare`, as in `Programs.prefill`. It returns the state before the
            last token of each prompt, which the loop may overwrite.
        keep, reads_tokens: as in `Batch`.
    """
    batch = BackendBatch(model, programs, len(sequences), keep, reads_tokens)
    batch.insert_all(sequences, process(functools.partial(batch.prepare_first_step, sequences)))
    return DecodingLoop(batch)


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
                self._loop = None  # its tensors may be between two tokens
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

    def __del__(self, is_finalizing=is_finalizing):  # the module may have lost its names
        # At interpreter shutdown there is nothing to release.
        if getattr(self, "_loop", None) is not None and not is_finalizing():
            self._loop.batch.close()
