"""Directory of prefix states, from which an engine continues after a restart."""

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

import numpy as np

from keras_recurrent.atomic_files import remove_temporary_folders
from keras_recurrent.checkpoints import files
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
        self._sizes: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._nbytes, self._is_failing = 0, False
        self._uses: queue.SimpleQueue = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefix-files", daemon=True)
        try:
            self._folder = os.fspath(folder)
            os.makedirs(self._folder, mode=0o700, exist_ok=True)  # files have tokens of users
            self._scan()
        except (OSError, TypeError) as error:
            raise ValueError(
                "`prefix_cache_dir` must be a directory that can be created and read; got "
                f"{folder!r} ({error}). Pass another one, or change its permissions."
            ) from error

    def _scan(self):
        """Lists the files, the least recently used first."""
        remove_temporary_folders(self._folder)
        found, num_others = [], 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):  # deleted by another server
                        stat = entry.stat()
                        found.append((stat.st_mtime_ns, entry.name, stat.st_size))
                num_others += entry.name.endswith(SUFFIX) and not self._is_own(entry.name)
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self._nbytes += size
        if num_others:
            log.warning(
                "%d files in %r are not used: they belong to other weights or another maximum "
                "length, or are not prefix states.",
                num_others,
                self._folder,
            )

    def _is_own(self, name):
        return name.startswith(self._model) and name.endswith(SUFFIX)

    def _path(self, name):
        return os.path.join(self._folder, name)

    def read(self, model):
        """Yields name, tokens and state of each file, the least recently used first.

        Files that are damaged or belong to other models are left out with a warning.
        """
        self._delete()
        for name in filter(self._is_own, list(self._sizes)):
            try:
                cache = GenerationCache.load(self._path(name), model)
                if cache.batch_size != 1 or cache.max_length != self._max_length:
                    raise ValueError(
                        "its batch size is not 1, or its maximum length is not that of this engine"
                    )
            except Exception as error:
                log.warning("A prefix state is not used, %s: %s", name, error)
                self._nbytes -= self._sizes.pop(name)  # so that it may be written anew
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
        if file in self._sizes:
            self._sizes.move_to_end(file)
            with contextlib.suppress(FileNotFoundError):
                self._set_time(file)
                return
            self._nbytes -= self._sizes.pop(file)
        prefix = self._find(name)
        if prefix is None:
            return
        # A `GenerationCache` has a last token, which its state does not contain.
        token_ids = np.append(prefix.token_ids, 0)
        cache = GenerationCache(prefix.state, [token_ids], self._max_length, self._key)
        cache.save(self._path(file))
        self._set_time(file)
        self._sizes[file] = os.path.getsize(self._path(file))
        self._nbytes += self._sizes[file]
        self._delete()

    def _set_time(self, file):
        now = time.time_ns()  # the time that the system would set may be that of a tick before
        os.utime(self._path(file), ns=(now, now))

    def _delete(self):
        while self._nbytes > self._max_bytes:
            file, size = self._sizes.popitem(last=False)
            self._nbytes -= size
            with contextlib.suppress(OSError):
                os.unlink(self._path(file))
