"""States after the beginnings of token sequences, where later requests start, and their files."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import queue
import re
import threading
import time
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_recurrent.atomic_files import remove_temporary_folders
from keras_recurrent.checkpoints import files
from keras_recurrent.checks.dtypes import bytes_of
from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.generation.cache_file import cache_key

SUFFIX = ".safetensors"
DELAY = 5.0  # seconds before a state is written; under load, most are dropped before
log = logging.getLogger(__name__)
# Hashes of the model and of the tokens.
NAME = re.compile(rf"[0-9a-f]{{16}}-[0-9a-f]{{64}}{re.escape(SUFFIX)}")


class PrefixFiles:
    """Files of prefix states. A thread writes them, and deletes the least recently used ones.

    The time of a file is that of its last use. Files of other models count and may be deleted, but
    are not read. Files with other names are left alone.

    Args:
        model, max_bytes, max_length, folder: as in `PrefixCache`.
        find: function that returns the `Prefix` of a name, or None if it is dropped. A state that
            is dropped before its turn is not written.
    """

    def __init__(self, model, max_bytes, max_length, folder, find):
        files.require("safetensors.numpy", "`prefix_cache_dir`")
        self._max_bytes, self._max_length, self._find = max_bytes, max_length, find
        self._key = cache_key(model)
        content = json.dumps([dataclasses.asdict(self._key), max_length], sort_keys=True)
        self._model = hashlib.sha256(content.encode()).hexdigest()[:16]
        self._unreadable, self._is_failing = set(), False
        self._uses: queue.SimpleQueue = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefix-files", daemon=True)
        try:
            self._folder = os.fspath(folder)
            os.makedirs(self._folder, mode=0o700, exist_ok=True)  # files have tokens of users
            remove_temporary_folders(self._folder)
            names = os.listdir(self._folder)
        except (OSError, TypeError) as error:
            raise ValueError(
                "`prefix_cache_dir` must be a directory that can be created and read; got "
                f"{folder!r} ({error}). Pass another one, or change its permissions."
            ) from error
        if others := [n for n in names if n.endswith(SUFFIX) and not self._is_own(n)]:
            log.warning(
                "Unused files in %r: %d. They belong to other weights or another maximum length, "
                "or are not prefix states.",
                self._folder,
                len(others),
            )

    def _list(self):
        """Returns the time of use, name and size of each file, the least recently used first."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in filter(lambda entry: NAME.fullmatch(entry.name), entries):
                with contextlib.suppress(FileNotFoundError):  # deleted by another server
                    stat = entry.stat()
                    found.append((stat.st_mtime_ns, entry.name, stat.st_size))
        return sorted(found)

    def _is_own(self, name):
        return name.startswith(self._model) and name.endswith(SUFFIX)

    def _path(self, name):
        return os.path.join(self._folder, name)

    def read(self, model):
        """Yields name, tokens and state of each file, the least recently used first.

        Files that are damaged or belong to other models are left out with a warning.
        """
        self._delete_oldest()
        for name in [name for _, name, _ in self._list() if self._is_own(name)]:
            try:
                cache = GenerationCache.load(self._path(name), model)
            except Exception as error:
                log.warning("A prefix state is not used, %s: %s", name, error)
                self._unreadable.add(name)  # so that it may be written anew
                continue
            digest = name.removeprefix(f"{self._model}-").removesuffix(SUFFIX)
            yield bytes.fromhex(digest), cache.token_ids[0][:-1], cache.state

    def start(self):
        self._thread.start()

    def use(self, name):
        """Writes the state of this name later, or marks its file as used; returns at once."""
        self._uses.put((name, time.monotonic() + DELAY))

    def close(self):
        """Writes the remaining states."""
        self._uses.put(None)
        self._is_closed.set()
        self._thread.join()

    def _run(self):
        while (use := self._uses.get()) is not None:
            name, due = use
            self._is_closed.wait(max(due - time.monotonic(), 0))
            try:
                self._update(name)
                self._is_failing = False
            except Exception:  # such as a full disk, which must not end the thread
                if not self._is_failing:
                    log.exception("Prefix states cannot be written to %s", self._folder)
                self._is_failing = True

    def _update(self, name):
        file = f"{self._model}-{name.hex()}{SUFFIX}"
        if file not in self._unreadable:
            with contextlib.suppress(FileNotFoundError):
                self._set_time(file)
                return
        prefix = self._find(name)
        if prefix is None:
            return
        # A `GenerationCache` has a last token, which its state does not contain.
        token_ids = np.append(prefix.token_ids, 0)
        cache = GenerationCache(prefix.state, [token_ids], self._max_length, self._key)
        cache.save(self._path(file))
        self._set_time(file)
        self._unreadable.discard(file)
        self._delete_oldest()

    def _set_time(self, file):
        now = time.time_ns()  # the time that the system would set may be that of a tick before
        os.utime(self._path(file), ns=(now, now))

    def _delete_oldest(self):
        files = self._list()
        excess = sum(size for _, _, size in files) - self._max_bytes
        for _, name, size in files:
            if excess > 0:
                excess -= size
                with contextlib.suppress(OSError):
                    os.unlink(self._path(name))


class Prefix(NamedTuple):
    """Tokens, an int32 array, and the state of a sequence after them, as a `Batch` takes it."""

    token_ids: Any
    state: Any
    nbytes: int


class PrefixCache:
    """Least recently used states, by the tokens that they are computed from.

    Args:
        max_bytes, folder: `prefix_cache_bytes` and `prefix_cache_dir` of the `Engine`.
        max_length: integer, the capacity of a state.

    Attributes:
        num_hits, num_tokens: integers, numbers of restored states and of their tokens.
        unpack: `Batch.unpack`, for files. The `Engine` sets it.
    """

    unpack: Any = staticmethod(lambda state: state)

    def __init__(self, model, max_bytes, max_length, folder=None):
        self._max_bytes, self._nbytes = max_bytes, 0
        self._prefixes: collections.OrderedDict[bytes, Prefix] = collections.OrderedDict()
        self._lengths: collections.Counter[int] = collections.Counter()
        self.num_hits, self.num_tokens = 0, 0
        self._files: Any = None
        if folder is not None and self.is_enabled:
            self._files = PrefixFiles(model, max_bytes, max_length, folder, self._find)
            for stored in self._files.read(model):
                self._add(*stored)
            self._files.start()

    @property
    def is_enabled(self):
        return self._max_bytes > 0

    def _find(self, name):
        """Returns the `Prefix` of a name, with a state of the backbone, or None."""
        prefix = self._prefixes.get(name)
        return prefix and prefix._replace(state=self.unpack(prefix.state))

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
