"""States after the beginnings of token sequences, from which later requests start."""

import collections
import hashlib
import os
import queue
import threading
import warnings
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_recurrent.checks.dtypes import bytes_of
from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.generation.cache_key import cache_key

SUFFIX = ".safetensors"


class _Entry(NamedTuple):
    length: int
    state: Any
    nbytes: int


class PrefixCache:
    """Least recently used states, by the tokens that they are computed from.

    Args:
        model: the language model.
        max_bytes: integer, maximum size of all states. 0: no states are stored.
        max_length: integer, the capacity of a state.
        folder: string, a directory of states of conversations, which a later engine reads. None:
            states are only in memory.
    """

    def __init__(self, model, max_bytes, max_length, folder=None):
        self._max_bytes, self._max_length, self._folder = max_bytes, max_length, folder
        self._entries: collections.OrderedDict[str, _Entry] = collections.OrderedDict()
        self._nbytes, self.num_hits, self.num_tokens = 0, 0, 0
        self._files: queue.SimpleQueue = queue.SimpleQueue()
        self._writer: Any = None
        if folder is not None and self.is_enabled:
            self._key = cache_key(model)
            self._read(model)
            self._writer = threading.Thread(target=self._write, name="prefix-cache", daemon=True)
            self._writer.start()

    @property
    def is_enabled(self):
        return self._max_bytes > 0

    def restore(self, sequence):
        """Starts a sequence from the longest stored prefix of its prompt without the last token."""
        prompt = np.asarray(sequence.prompt[:-1], "int32")
        lengths = sorted({e.length for e in self._entries.values() if e.length <= len(prompt)})
        found, checksum, start = None, hashlib.sha256(), 0
        for length in lengths:
            checksum.update(prompt[start:length].tobytes())
            start, name = length, checksum.hexdigest()
            if name in self._entries:
                found = name
        if found is not None:
            self._entries.move_to_end(found)
            sequence.row, length = self._entries[found].state, self._entries[found].length
            sequence.num_cached = sequence.num_processed = length
            self.num_hits += 1
            self.num_tokens += length

    def add(self, token_ids, state, is_conversation=False):
        """Stores the state after some tokens.

        Args:
            token_ids: integers, at least one.
            state: the state of the backbone after them, of batch size 1.
            is_conversation: boolean, True also writes it to the folder.
        """
        token_ids = np.asarray(token_ids, "int32")
        if not self.is_enabled or not len(token_ids):
            return
        name = _name(token_ids)
        self._store(name, len(token_ids), state)
        if self._writer is not None and is_conversation and name in self._entries:
            self._files.put((name, token_ids, state))

    def _store(self, name, length, state):
        nbytes = sum(map(bytes_of, keras.tree.flatten(state)))
        if name in self._entries:
            self._nbytes -= self._entries.pop(name).nbytes
        self._entries[name] = _Entry(length, state, nbytes)
        self._nbytes += nbytes
        while self._nbytes > self._max_bytes:
            dropped, entry = self._entries.popitem(last=False)
            self._nbytes -= entry.nbytes
            if self._writer is not None:
                self._files.put((dropped, None, None))

    def _path(self, name):
        return os.path.join(self._folder, name + SUFFIX)

    def _read(self, model):
        """Reads the files of the folder, the most recent ones last."""
        os.makedirs(self._folder, exist_ok=True)
        paths = [entry for entry in os.scandir(self._folder) if entry.name.endswith(SUFFIX)]
        for entry in sorted(paths, key=lambda entry: entry.stat().st_mtime):
            try:
                cache = GenerationCache.load(entry.path, model)
                if cache.batch_size != 1 or cache.max_length != self._max_length:
                    raise ValueError(
                        f"its `max_length` is {cache.max_length}, and that of the engine is "
                        f"{self._max_length}"
                    )
            except ValueError as error:
                warnings.warn(f"The prefix state {entry.path} is not used: {error}", stacklevel=4)
                continue
            tokens = cache.token_ids[0][:-1]
            self._store(_name(tokens), len(tokens), cache.state)

    def _write(self):
        """Writes and deletes files, in the order of the queue, until it gets None."""
        while (item := self._files.get()) is not None:
            name, token_ids, state = item
            try:
                if state is None:
                    if os.path.exists(self._path(name)):
                        os.unlink(self._path(name))
                    continue
                # A `GenerationCache` has a last token, which its state does not contain.
                token_ids = [*token_ids, 0]
                GenerationCache(state, [token_ids], self._max_length, self._key).save(
                    self._path(name)
                )
            except OSError as error:
                warnings.warn(f"A prefix state was not written: {error}", stacklevel=2)

    def close(self):
        """Waits until all files are written."""
        if self._writer is not None:
            self._files.put(None)
            self._writer.join()
            self._writer = None


def _name(token_ids):
    """Returns the name of the state after some tokens, an int32 array."""
    return hashlib.sha256(token_ids.tobytes()).hexdigest()
