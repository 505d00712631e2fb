"""The decoding loop of `generate`, `stream` and the engine."""

from typing import Any

import keras

from keras_recurrent.generation.sampling import Logprobs

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
        tokens of the previous one.
        """
        if not self.batch.active_slots:
            return False
        column = next(self._columns, None)
        if column is None:
            launched = self._launched or self.batch.step()
            runs_ahead = self.batch.runs_ahead and self.batch.has_work
            self._launched = self.batch.step() if runs_ahead else None
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
        for sequence in ended:  # last, so that no token waits for the removal
            self._end(sequence)

    def _end(self, sequence):
        self.batch.remove(sequence)


def _columns(slots, results):
    """Waits for a step; yields slots, tokens [B] and `Logprobs` for each of its positions."""
    tokens, logprobs = results()
    for t, column in enumerate(tokens.T.tolist()):
        yield slots, column, logprobs and Logprobs(*(array[:, t] for array in logprobs))


def start_decoding(model, programs, sequences, state, keep=False, reads_tokens=False):
    """Returns the `DecodingLoop` of the sequences of one call of `generate` or `stream`.

    Args:
        model: the language model.
        programs: its `Programs`.
        sequences: a list of the `Sequence`s.
        state: the state before the last token of each prompt, which is overwritten.
        keep, reads_tokens: as in `Batch`.
    """
    batch = BackendBatch(model, programs, len(sequences), keep, reads_tokens)
    batch.insert_all(sequences, state)
    return DecodingLoop(batch)
