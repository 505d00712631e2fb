"""Packed sequences from text files that need not fit into memory."""

import collections
import numbers
import os
import sys
from typing import Any

import grain
import keras
import numpy as np

from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.datasets.text_files import check_not_empty, read_documents, split_files

# Sizes of the groups that are packed and shuffled together.
CHUNKS_PER_GROUP, DOCUMENTS_PER_GROUP = 16, 1024
THREADS = 2


class PackedText(grain.IterDataset):
    """Batches of packed sequences from text files, which need not fit into memory.

    Each line is a document; empty lines are skipped. In `.jsonl` files each line is an object whose
    "text" is the document. For other formats, pass a dataset of grain that yields strings; with one
    document per file: `grain.MapDataset.source(paths).map(lambda path: open(path).read())`.

    **Order.** With a seed, text is shuffled anew in each pass: files are split at ends of lines
    into chunks of 256 KiB, sixteen random chunks are read at a time, and their documents and the
    packed sequences are shuffled. A dataset of grain of known length is shuffled as a whole, and
    1024 documents are packed at a time. Memory holds little more than the documents that are packed
    together. Equal arguments give equal batches.

    **Processes.** If several processes train one model, each reads different files, such as
    `files[jax.process_index() :: jax.process_count()]`, and yields its share of each batch, under a
    distribution with `auto_shard_dataset=False`.

    **Position.** This is a dataset of grain: `iter(rows)` has `get_state()`, which returns a small
    JSON-serializable dictionary, and `set_state(state)`, which continues from there. Only the
    group of documents that are packed together is read again. Keras reads ahead of the training
    step; `keras_recurrent.callbacks.TrainingBackup` saves the position after the last trained
    batch.

    Args:
        documents: a path or a list of paths; or a `grain.MapDataset` of strings, which is read
            `passes` times like files; or a `grain.IterDataset` of strings, which is read once. A
            dataset may also have conversations, or dictionaries of a prompt as `prompts` and its
            response as `responses`.
        preprocessor: a `RecurrentCausalLMPreprocessor` with `packed=True`.
        batch_size: integer, sequences per batch.
        passes: integer, number of times that all text is read; the last batch may be smaller. None:
            endless, for `fit` with `steps_per_epoch`.
        seed: integer, seed of the shuffling. None: no shuffling.

    Yields:
        `(x, y, sample_weight)` of the preprocessor: `x` is a dictionary of `token_ids` (int32),
        `padding_mask` (bool) and `segment_ids` (int32), `y` is int32 and `sample_weight` bool, all
        `[batch_size, sequence_length]`.

    Raises:
        ImportError: grain is not installed.
        FileNotFoundError: there is no such file.
        ValueError: a file has another format, there is no text, the preprocessor does not pack, a
            number is not an integer of at least 1, or `seed` or `passes` is given for a
            `grain.IterDataset`. While text is read: a line is not UTF-8, or has no string "text".

    Example:

    >>> import pathlib, tempfile
    >>> from keras_recurrent.datasets import PackedText
    >>> from keras_recurrent.models import GriffinCausalLMPreprocessor
    >>> from keras_recurrent.tokenizers import ByteTokenizer
    >>> preprocessor = GriffinCausalLMPreprocessor(ByteTokenizer(), sequence_length=8, packed=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "text.txt")
    ...     _ = file.write_text("ab\\nc\\nlonger\\n")
    ...     for x, y, sample_weight in PackedText(str(file), preprocessor, 2, passes=1):
    ...         print(x["token_ids"])
    [[  1 100 101   2   1 102   2   0]
     [  1 111 114 113 106 104 117   2]]
    """

    def __init__(self, documents, preprocessor, batch_size, *, passes=None, seed=None):
        super().__init__()
        check_positive_integer("batch_size", batch_size)
        check_positive_integer("passes", passes, or_none=True)
        if seed is not None and (not isinstance(seed, numbers.Integral) or int(seed) < 0):
            raise ValueError(f"`seed` must be an integer from 0 on; got {seed!r}.")
        if not getattr(preprocessor, "packed", False):
            raise ValueError(
                "`preprocessor` must be one that packs, such as "
                "`GriffinCausalLMPreprocessor(tokenizer, packed=True)`; got "
                f"{type(preprocessor).__name__}."
            )
        self._preprocessor, self._shuffles = preprocessor, seed is not None
        groups, description = self._make_groups(documents, passes, seed)
        self.is_endless = passes is None and not isinstance(documents, grain.IterDataset)
        rows = grain.experimental.FlatMapIterDataset(groups, _Rows())
        self._batches = rows.batch(batch_size)
        self.description = {
            "documents": description,
            "batch_size": int(batch_size),
            "sequence_length": preprocessor.sequence_length,
            "passes": passes,
            "seed": seed,
        }
        self._tracked: Any = None  # iterator that `start_at` made
        self._next: Any = None  # `_tracked`, until it is requested

    def _make_groups(self, documents, passes, seed) -> tuple[Any, Any]:
        """Returns a dataset of lists of packed sequences, and a description of the documents."""
        if isinstance(documents, grain.IterDataset):
            if seed is not None or passes is not None:
                raise ValueError(
                    "`seed` and `passes`: a `grain.IterDataset` has an order and an end already. "
                    "Leave both out, and shuffle and repeat the dataset itself."
                )
            groups = documents.batch(DOCUMENTS_PER_GROUP, batch_fn=list)
            return groups.map(lambda texts: self._pack(texts, None)), "a stream"
        elements: Any = documents
        read: Any
        description: Any
        if isinstance(documents, grain.MapDataset):
            size, read, description = DOCUMENTS_PER_GROUP, list, len(documents)
        else:
            if isinstance(documents, (str, os.PathLike)):
                documents = [documents]
            paths = [os.fspath(path) for path in documents]
            elements = grain.MapDataset.source(split_files(paths))
            size, read = CHUNKS_PER_GROUP, _read_chunks
            check_not_empty(paths)
            description = [[os.path.basename(path), os.path.getsize(path)] for path in paths]
        if seed is not None:
            elements = elements.shuffle(seed=seed)
        if len(elements) < sys.maxsize:
            elements = elements.repeat(passes)
        groups = elements.batch(size, batch_fn=list).random_map(
            lambda group, rng: self._pack(read(group), rng), seed=seed or 0
        )
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=THREADS)
        return groups.to_iter_dataset(options), description

    def _pack(self, texts, rng):
        """Packs texts into a list of sequences, each `(x, y, sample_weight)`."""
        # `grain.experimental.FirstFitPackIterDataset` takes 1.3 to 1.7 times the CPU time.
        if self._shuffles:
            texts = [texts[i] for i in rng.permutation(len(texts))]
        x, y, sample_weight = self._preprocessor.pack(texts)
        rows = np.flatnonzero(x["padding_mask"].any(axis=1))
        rows = rng.permutation(rows) if self._shuffles else rows
        return [
            ({name: array[row] for name, array in x.items()}, y[row], sample_weight[row])
            for row in rows
        ]

    def __iter__(self):
        tracked, self._next = self._next, None
        return iter(self._batches) if tracked is None else tracked

    # Called by `keras_recurrent.callbacks.TrainingBackup`.

    def start_at(self, state=None, skip=0):
        """Makes the next iterator begin at a state, after `skip` batches of padding.

        Keras counts the batches of an epoch and takes those again that it has trained.
        """
        length = self.description["sequence_length"]
        padding = keras.tree.map_structure(
            lambda row: np.repeat(row, self.description["batch_size"], 0),
            self._preprocessor.pack([], length),
        )
        batches = iter(self._batches)
        if state is not None:
            batches.set_state(state)
        self._tracked = self._next = TrackedIterator(batches, skip, padding)

    def state_after(self, number):
        """Returns the state after `number` batches of that iterator, including padding."""
        return self._tracked.state_after(number)


class TrackedIterator(grain.DatasetIterator):
    """Iterator that keeps the state after each batch until that of a later one is requested.

    Keras reads batches before they are trained.
    """

    def __init__(self, batches, skip, padding):
        super().__init__()
        self._batches, self._skip, self._padding = batches, skip, padding
        self._count = 0
        self._states = collections.deque([(0, batches.get_state())])  # (number of batches, state)

    def __next__(self):
        self._count += 1
        if self._count <= self._skip:
            return self._padding
        batch = next(self._batches)
        self._states.append((self._count, self._batches.get_state()))
        return batch

    def get_state(self):
        return self._batches.get_state()

    def set_state(self, state):
        self._batches.set_state(state)
        self._states = collections.deque([(self._count, state)])

    def state_after(self, number):
        while len(self._states) > 1 and self._states[1][0] <= number:
            self._states.popleft()
        return self._states[0][1]


def _read_chunks(chunks):
    return [text for chunk in chunks for text in read_documents(chunk)]


class _Rows(grain.experimental.FlatMapTransform):
    """Flattens lists of sequences."""

    def flat_map(self, element):
        return element
