"""States after the beginnings of token sequences, from which later requests start."""

import collections
import hashlib
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_recurrent.checks.dtypes import bytes_of
from keras_recurrent.serving.prefix_files import PrefixFiles


class Prefix(NamedTuple):
    """Tokens, an int32 array, and the state of the backbone after them, of batch size 1."""

    token_ids: Any
    state: Any
    nbytes: int


class PrefixCache:
    """Least recently used states, by the tokens that they are computed from.

    Args:
        model: the language model.
        max_bytes, folder: `prefix_cache_bytes` and `prefix_cache_dir` of the `Engine`.
        max_length: integer, the capacity of a state.

    Attributes:
        num_hits, num_tokens: integers, numbers of restored states and of their tokens.
    """

    def __init__(self, model, max_bytes, max_length, folder=None):
        self._max_bytes, self._nbytes = max_bytes, 0
        self._prefixes: collections.OrderedDict[bytes, Prefix] = collections.OrderedDict()
        self._lengths: collections.Counter[int] = collections.Counter()
        self.num_hits, self.num_tokens = 0, 0
        self._files: Any = None
        if folder is not None and self.is_enabled:
            self._files = PrefixFiles(model, max_bytes, max_length, folder, self._prefixes.get)
            for stored in self._files.read(model):
                self._add(*stored)
            self._files.start()

    @property
    def is_enabled(self):
        return self._max_bytes > 0

    def restore(self, sequence):
        """Starts a sequence from the longest stored prefix of its prompt without the last token."""
        prompt, found, checksum, start = sequence.prompt, None, _checksum(sequence.salt), 0
        for length in sorted(self._lengths):
            if length >= len(prompt):
                break
            checksum.update(prompt[start:length])
            start, name = length, checksum.digest()
            if name in self._prefixes:
                found = name
        if found is not None:
            self._use(found)
            prefix = self._prefixes[found]
            sequence.state = prefix.state
            sequence.num_cached = sequence.num_processed = len(prefix.token_ids)
            self.num_hits += 1
            self.num_tokens += sequence.num_cached

    def add(self, token_ids, state, salt=None):
        """Stores the state after tokens, unless it is stored; arguments as in `Prefix`.

        salt: string; only sequences with this salt start from the state. None: only sequences
        without a salt.
        """
        if self.is_enabled and len(token_ids):
            checksum = _checksum(salt)
            checksum.update(token_ids.tobytes())
            self._add(checksum.digest(), token_ids, state)

    def _add(self, name, token_ids, state):
        if name not in self._prefixes:
            nbytes = sum(map(bytes_of, keras.tree.flatten(state)))
            self._prefixes[name] = Prefix(np.array(token_ids), state, nbytes)
            self._lengths[len(token_ids)] += 1
            self._nbytes += nbytes
            while self._nbytes > self._max_bytes:
                _, dropped = self._prefixes.popitem(last=False)
                self._nbytes -= dropped.nbytes
                length = len(dropped.token_ids)
                self._lengths[length] -= 1
                if not self._lengths[length]:
                    del self._lengths[length]
        if name in self._prefixes:  # unless it is too large
            self._use(name)

    def _use(self, name):
        self._prefixes.move_to_end(name)
        if self._files is not None:
            self._files.use(name)

    def close(self):
        """Waits until all files are written."""
        if self._files is not None:
            self._files.close()


def _checksum(salt):
    """Returns the hash that becomes the name of a state when it is updated with its tokens."""
    return hashlib.sha256(b"" if salt is None else hashlib.sha256(salt.encode()).digest())
