"""Generation cache: the state of sequences between calls of `generate`."""

from collections.abc import Iterable

import keras
import numpy as np
from keras import ops

from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.checks.dtypes import bytes_of
from keras_recurrent.generation.cache_file import check_same_model, read_file, write_file


def select_rows(state, rows):
    """Returns the state of the sequences with the indices `rows`, a NumPy array."""
    indices = ops.convert_to_tensor(rows.astype("int32"))
    return keras.tree.map_structure(lambda a: ops.take(a, indices, axis=0), state)


class GenerationCache:
    """State of a language model after the tokens of several sequences.

    `prefill`, `generate(..., return_cache=True)` and `stream(...).cache` return a cache, and all
    three continue from a cache that is passed as `cache=`. A cache is immutable and may be
    continued any number of times; each continuation returns a new one. Its size does not depend on
    the length of the text, except in models that attend to all tokens.

    The cache stores the state before the last token of each sequence, and this token, which is the
    input of the next step. A sequence that ended at a stop token continues after that token.

    Attributes:
        batch_size: integer, number of sequences.
        token_ids: a list of int32 NumPy arrays, all tokens of each sequence.
        num_tokens: int64 `[B]`, a NumPy array: the number of tokens of each sequence.
        max_length: integer, maximum number of tokens of a sequence. None: no limit.
        conversations: a list of the conversation of each sequence, which `chat` recorded: its
            `messages`, the rendered `prompt`, and the `ending` of the answer. None for other text.
        last_token: int32 `[B]`, a NumPy array: the last token of each sequence.
        state: the state of the backbone before that token, structured as
            `backbone.get_initial_state` returns it.
        nbytes: integer, size of the state in bytes.

    Example: a prompt is processed once, and two texts continue from it.

    >>> import keras_recurrent
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> start = model.prefill("All happy families")
    >>> start
    <GenerationCache of 1 sequence, 19 tokens>
    >>> a, cache = model.generate(" are", max_length=8, cache=start, return_cache=True)
    >>> b = model.generate(" have", max_length=8, cache=start)
    >>> start.batch_size, int(start.num_tokens[0]), int(cache.num_tokens[0])
    (1, 19, 27)
    """

    def __init__(self, state, token_ids, max_length, key, conversations=None):
        self.state, self.max_length, self.key = state, max_length, key
        self.token_ids = [np.array(ids, "int32") for ids in token_ids]
        self.last_token = np.array([ids[-1] for ids in self.token_ids], "int32")
        self.num_tokens = np.array([len(ids) for ids in self.token_ids], "int64")
        self.conversations = list(conversations or [None] * len(self.token_ids))
        for array in (*self.token_ids, self.last_token, self.num_tokens):
            array.flags.writeable = False

    @property
    def batch_size(self):
        return len(self.token_ids)

    @property
    def nbytes(self):
        return sum(bytes_of(array) for array in keras.tree.flatten(self.state))

    def __repr__(self):
        count = self.batch_size
        sequences = "1 sequence" if count == 1 else f"{count} sequences"
        fewest, most = int(self.num_tokens.min()), int(self.num_tokens.max())
        tokens = f"{most} tokens" if fewest == most else f"{fewest} to {most} tokens"
        limit = "" if self.max_length is None else f", at most {self.max_length}"
        return f"<GenerationCache of {sequences}, {tokens}{limit}>"

    def select(self, rows):
        """Returns a cache of selected sequences.

        Args:
            rows: a list of integers, indices of sequences from 0, in any order; an index may be
                repeated.

        Raises:
            ValueError: `rows` is empty, or an index is out of range.
        """
        rows = np.asarray(rows)
        if rows.ndim != 1 or not rows.size or rows.dtype.kind not in "iu":
            raise ValueError(f"`rows` must be a list of integers, at least one; got {rows!r}.")
        if rows.min() < 0 or rows.max() >= self.batch_size:
            raise ValueError(
                f"`rows` must be from 0 to {self.batch_size - 1}, the sequences of this cache; got "
                f"{rows.tolist()}."
            )
        state = select_rows(self.state, rows)
        return self._replace(state, *zip(*(self._sequences[row] for row in rows), strict=True))

    def repeat(self, times):
        """Returns a cache in which each sequence is repeated `times` times, copies adjacent.

        Raises:
            ValueError: `times` is not an integer of at least 1.
        """
        check_positive_integer("times", times)
        return self.select(np.repeat(np.arange(self.batch_size), times))

    @classmethod
    def join(cls, caches):
        """Concatenates caches into one, in order.

        Args:
            caches: a list of caches of one model, with the same `max_length`.

        Raises:
            ValueError: the list is empty, or the caches differ in model or `max_length`.
        """
        caches = list(caches) if isinstance(caches, Iterable) else caches
        is_list = isinstance(caches, list) and caches
        if not is_list or not all(isinstance(cache, cls) for cache in caches):
            raise ValueError(f"`caches` must be a list of `GenerationCache`s; got {caches!r}.")
        first = caches[0]
        for cache in caches[1:]:
            if cache.key != first.key:
                raise ValueError("`caches` must be of one model, with the same weights.")
            if cache.max_length != first.max_length:
                raise ValueError(
                    "`caches` must have the same `max_length`; got "
                    f"{[cache.max_length for cache in caches]}."
                )
        states = [cache.state for cache in caches]
        state = keras.tree.map_structure(lambda *parts: ops.concatenate(parts, axis=0), *states)
        sequences = [sequence for cache in caches for sequence in cache._sequences]
        return first._replace(state, *zip(*sequences, strict=True))

    def save(self, path):
        """Saves the cache in one safetensors file.

        The file is replaced in one step: it is first written to a temporary folder in the same
        directory, whose name begins with a dot. A symbolic link is followed. A missing directory is
        created. Only its owner can read a new file, which contains the conversation; an existing
        file keeps its permissions.

        Args:
            path: string, the file.

        Raises:
            ImportError: safetensors is not installed.
            IsADirectoryError: `path` is a directory.
        """
        write_file(self, path)

    @classmethod
    def load(cls, path, model):
        """Loads a cache for a model with the same weights as when it was saved.

        Args:
            path: string, a file saved by `save`, on any backend.
            model: the language model.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is not a saved cache, is damaged, or belongs to another model. The
                message names the difference: the sizes, the dtype, quantization, low-rank weights
                (LoRA), or the weights, compared by a hash of about 256 elements of each.
        """
        if not hasattr(getattr(model, "backbone", None), "cache_spec"):
            raise ValueError(
                "`model` must be a language model of `keras_recurrent.models`; got a "
                f"{type(model).__name__}."
            )
        return cls(*read_file(path, model))

    def check(self, model):
        """Raises a `ValueError` if the cache belongs to another model, as `load` does."""
        check_same_model(self.key, model)

    @property
    def _sequences(self):
        return list(zip(self.token_ids, self.conversations, strict=True))

    def _replace(self, state, token_ids, conversations=None):
        return type(self)(state, token_ids, self.max_length, self.key, conversations)
