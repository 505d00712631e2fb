"""Text larger than memory, from files into packed rows."""

import collections
import numbers
import os
import sys
from typing import Any

import grain
import keras
import numpy as np

from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.datasets.text_files import check_some_text, documents_of, pieces_of

# What is packed at a time, and shuffled in itself: pieces of files, or documents of a dataset.
PIECES, DOCUMENTS = 16, 1024
THREADS = 2


class PackedText(grain.IterDataset):
    """Batches of packed rows of the text in files, which need not fit into memory.

    ```python
    import keras_recurrent

    def train(model, files, held_out):  # a language model with `packed=True`
        rows = keras_recurrent.datasets.PackedText(files, model.preprocessor, 8, seed=1)
        val = keras_recurrent.datasets.PackedText(held_out, model.preprocessor, 8, passes=1)
        backup = keras_recurrent.callbacks.TrainingBackup("run.backup", data=rows)
        model.fit(
            rows, validation_data=val, steps_per_epoch=1000, epochs=10, callbacks=[backup]
        )
    ```

    A line is a document; empty ones are left out. In files `.jsonl` a line is an object, whose
    "text" is the document. What else there is comes by a dataset of grain that yields strings: of
    a document a file, say, `grain.MapDataset.source(paths).map(lambda path: open(path).read())`.

    **Order.** With a seed, text is shuffled, in each pass anew: the files are cut into pieces of
    256 KiB at ends of lines, sixteen of them, from anywhere, are read at a time, and their
    documents, and the rows that these make, are shuffled among each other. A dataset of grain of
    known length is shuffled as a whole, and 1024 documents are packed at a time. Little more than
    what is packed at a time is in memory. The same arguments give the same batches.

    **Processes.** Where several processes train one model, each reads files of its own, such as
    `files[keras.distribution.process_id() :: keras.distribution.num_processes()]`, and its share of
    the rows of a batch, under a distribution with `auto_shard_dataset=False`.

    **Place.** It is a dataset of grain: `iter(rows)` has `get_state()`, a small dictionary that
    JSON can hold, and `set_state(state)`, after which it goes on from there, reading again only
    what is packed together. Keras reads ahead of the step that it trains;
    `keras_recurrent.callbacks.TrainingBackup` keeps the place after the batch that was trained.

    Args:
        documents: a path or a list of paths; or a `grain.MapDataset` of strings, which is read
            `passes` times as files are; or a `grain.IterDataset` of strings, which is read once, to
            its end.
        preprocessor: a `RecurrentCausalLMPreprocessor` with `packed=True`.
        batch_size: integer, rows a batch.
        passes: integer, how often all text is read; the last batch may be smaller. None: without
            end, for `fit` with `steps_per_epoch`.
        seed: integer, of the shuffling; None leaves text in its order.

    Yields:
        `(x, y, sample_weight)`, as the preprocessor makes them: `x` a dictionary of `token_ids`
        (int32), `padding_mask` (bool) and `segment_ids` (int32), `y` (int32) and `sample_weight`
        (bool), all `[batch_size, sequence_length]`.

    Raises:
        ImportError: grain is not installed.
        FileNotFoundError: there is no such file.
        ValueError: files of another format, no text at all, a preprocessor that does not pack,
            numbers that are none from 1 on; `seed` or `passes` for a dataset that has an order
            and an end of its own. While text is read: a line that is not UTF-8 or not as above.

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

    def __init__(self, documents, preprocessor, batch_size, passes=None, seed=None):
        super().__init__()
        check_positive_integer("batch_size", batch_size)
        if passes is not None:
            check_positive_integer("passes", passes)
        if seed is not None and (not isinstance(seed, numbers.Integral) or int(seed) < 0):
            raise ValueError(f"`seed` must be an integer from 0 on; got {seed!r}.")
        if not getattr(preprocessor, "packed", False):
            raise ValueError(
                "`preprocessor` must be one that packs, such as "
                "`GriffinCausalLMPreprocessor(tokenizer, packed=True)`; got "
                f"{type(preprocessor).__name__}."
            )
        self._preprocessor, self._shuffles = preprocessor, seed is not None
        groups, says = self._groups(documents, passes, seed)
        self.is_endless = passes is None and not isinstance(documents, grain.IterDataset)
        rows = grain.experimental.FlatMapIterDataset(groups, _Rows())
        self._batches = rows.batch(batch_size)
        self.description = {
            "documents": says,
            "batch_size": int(batch_size),
            "sequence_length": preprocessor.sequence_length,
            "passes": passes,
            "seed": seed,
        }
        self._next_start = None  # where the next iterator begins, if not at the beginning
        self._trained = None  # the iterator that began there

    def _groups(self, documents, passes, seed) -> tuple[Any, Any]:
        """What is packed together, as rows, and what tells this text from another."""
        if isinstance(documents, grain.IterDataset):
            if seed is not None or passes is not None:
                raise ValueError(
                    "`seed` and `passes`: a `grain.IterDataset` has an order and an end of its "
                    "own. Leave both out, and shuffle and repeat the dataset itself."
                )
            groups = documents.batch(DOCUMENTS, batch_fn=list)
            return groups.map(lambda texts: self._packed(texts, None)), "a stream"
        elements: Any
        says: Any
        if isinstance(documents, grain.MapDataset):
            elements, size, read, says = documents, DOCUMENTS, _same, len(documents)
        else:
            if isinstance(documents, (str, os.PathLike)):
                documents = [documents]
            paths = [os.fspath(path) for path in documents]
            elements, size, read = grain.MapDataset.source(pieces_of(paths)), PIECES, _read
            check_some_text(paths)
            says = [[os.path.basename(path), os.path.getsize(path)] for path in paths]
        if seed is not None:
            elements = elements.shuffle(seed=seed)
        if len(elements) < sys.maxsize:
            elements = elements.repeat(passes)
        groups = elements.batch(size, batch_fn=list).random_map(
            lambda group, rng: self._packed(read(group), rng), seed=seed or 0
        )
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=THREADS)
        return groups.to_iter_dataset(options), says

    def _packed(self, texts, rng):
        """A list of rows, each `(x, y, sample_weight)`."""
        if self._shuffles:
            texts = [texts[place] for place in rng.permutation(len(texts))]
        x, y, sample_weight = self._preprocessor.pack(texts)
        rows = np.flatnonzero(x["padding_mask"].any(axis=1))
        rows = rng.permutation(rows) if self._shuffles else rows
        return [
            ({name: array[row] for name, array in x.items()}, y[row], sample_weight[row])
            for row in rows
        ]

    def __iter__(self):
        if self._next_start is None:
            return PackedTextIterator(iter(self._batches))
        (state, skip), self._next_start = self._next_start, None
        self._trained = PackedTextIterator(iter(self._batches), skip, self._nothing, True)
        if state is not None:
            self._trained.set_state(state)
        return self._trained

    def _nothing(self):
        """A batch of the shape of all others, which costs nothing."""
        size, length = self.description["batch_size"], self.description["sequence_length"]
        x, y, sample_weight = self._preprocessor.pack([], length)
        return keras.tree.map_structure(lambda a: np.repeat(a, size, 0), (x, y, sample_weight))

    # What a backup asks for.

    def start_at(self, state=None, skip=0):
        """Lets the next iterator begin at a place, after `skip` batches of padding.

        Keras counts the batches of an epoch, and so takes those once more that it has trained.
        """
        self._next_start, self._trained = (state, skip), None

    def state_after(self, number):
        """The place after so many batches of that iterator, padding included."""
        if self._trained is None:  # Keras has not asked for a batch yet
            return self._next_start and self._next_start[0]
        return self._trained.state_after(number)


class PackedTextIterator(grain.DatasetIterator):
    """Batches one after another. Keeps the place after each until it is asked for a later one."""

    def __init__(self, batches, skip=0, nothing=None, keeps_places=False):
        super().__init__()
        self._batches, self._skip, self._nothing = batches, skip, nothing
        self._given, self._keeps_places = 0, keeps_places
        # The place after each batch that was given, as not all of them were trained yet.
        self._places = collections.deque([(0, batches.get_state())])

    def __next__(self):
        if self._given < self._skip:
            self._given += 1
            return self._nothing()
        batch = next(self._batches)
        self._given += 1
        if self._keeps_places:
            self._places.append((self._given, self._batches.get_state()))
        return batch

    def get_state(self):
        return self._batches.get_state()

    def set_state(self, state):
        self._batches.set_state(state)
        self._places = collections.deque([(self._given, state)])

    def state_after(self, number):
        while len(self._places) > 1 and self._places[1][0] <= number:
            self._places.popleft()
        return self._places[0][1]


def _same(documents):
    return documents


def _read(pieces):
    return [text for piece in pieces for text in documents_of(piece)]


class _Rows(grain.experimental.FlatMapTransform):
    """Rows one by one, of a list of them."""

    def flat_map(self, element):
        return element
