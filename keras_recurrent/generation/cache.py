"""What a language model knows of texts, kept between calls."""

import keras
import numpy as np
from keras import ops

from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.checks.dtypes import bytes_of
from keras_recurrent.generation.cache_file import read_file, write_file
from keras_recurrent.generation.cache_key import check_fit, fit_of


class GenerationCache:
    """What a language model knows of some rows of text, to go on from as often as one likes.

    `prefill` makes one, `generate(..., return_cache=True)` and `stream(...).cache` return one, and
    all three go on from one that they are given as `cache=`. They never change it: going on makes a
    new one. Its size does not depend on the length of the text, but for attention to all tokens.

    The state has seen all tokens of a row but the last, which stands beside it: it is what the next
    step takes. So a row that stopped at a stop token goes on after that token.

    Attributes:
        batch_size: integer, rows.
        num_tokens: int64 `[B]`, a NumPy array: the tokens of each row so far.
        max_length: integer, the most tokens that a row may have; None: there is no limit.
        last_token: int32 `[B]`, a NumPy array: the last token of each row.
        state: what the backbone has seen before that token, as `backbone.get_initial_state` makes
            it.
        nbytes: integer, the bytes of the state.

    Example: a prompt is read once, and two texts begin from it.

    >>> import keras_recurrent
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> start = model.prefill("All happy families")
    >>> start
    <GenerationCache of 1 row, 19 tokens>
    >>> a, cache = model.generate(" are", max_length=8, cache=start, return_cache=True)
    >>> b = model.generate(" have", max_length=8, cache=start)
    >>> start.batch_size, int(start.num_tokens[0]), int(cache.num_tokens[0])
    (1, 19, 27)
    """

    def __init__(self, state, last_token, num_tokens, max_length, fit):
        self.state, self.max_length, self.fit = state, max_length, fit
        self.last_token = np.array(last_token, "int32")
        self.num_tokens = np.array(num_tokens, "int64")
        for array in (self.last_token, self.num_tokens):
            array.flags.writeable = False

    @property
    def batch_size(self):
        return len(self.last_token)

    @property
    def nbytes(self):
        return sum(bytes_of(array) for array in keras.tree.flatten(self.state))

    def __repr__(self):
        rows = "1 row" if self.batch_size == 1 else f"{self.batch_size} rows"
        fewest, most = int(self.num_tokens.min()), int(self.num_tokens.max())
        tokens = f"{most} tokens" if fewest == most else f"{fewest} to {most} tokens"
        room = "" if self.max_length is None else f", room for {self.max_length}"
        return f"<GenerationCache of {rows}, {tokens}{room}>"

    def select(self, rows):
        """A cache of some of the rows.

        Args:
            rows: a list of integers from 0 on, in any order; one may stand there several times.

        Raises:
            ValueError: no rows, or one that is not there.
        """
        rows = np.asarray(rows)
        if rows.ndim != 1 or not rows.size or rows.dtype.kind not in "iu":
            raise ValueError(f"`rows` must be a list of integers, at least one; got {rows!r}.")
        if rows.min() < 0 or rows.max() >= self.batch_size:
            raise ValueError(
                f"`rows` must be from 0 to {self.batch_size - 1}, the rows of this cache; got "
                f"{rows.tolist()}."
            )
        indices = ops.convert_to_tensor(rows.astype("int32"))
        state = keras.tree.map_structure(lambda a: ops.take(a, indices, axis=0), self.state)
        return self._with(state, self.last_token[rows], self.num_tokens[rows])

    def repeat(self, times):
        """A cache in which each row stands `times` times, its copies beside each other.

        Raises:
            ValueError: `times` is no integer from 1 on.
        """
        check_positive_integer("times", times)
        return self.select(np.repeat(np.arange(self.batch_size), times))

    @classmethod
    def join(cls, caches):
        """One cache of the rows of several, in their order.

        Args:
            caches: a list of caches of one model, with the same `max_length`.

        Raises:
            ValueError: there are none, or they are not of one model or not of one `max_length`.
        """
        caches = list(caches)
        if not caches or not all(isinstance(cache, cls) for cache in caches):
            raise ValueError(f"`caches` must be a list of `GenerationCache`s; got {caches!r}.")
        first = caches[0]
        for cache in caches[1:]:
            if cache.fit != first.fit:
                raise ValueError("`caches` must be of one model, with the same weights.")
            if cache.max_length != first.max_length:
                raise ValueError(
                    "`caches` must have the same `max_length`; got "
                    f"{[cache.max_length for cache in caches]}."
                )
        states = [cache.state for cache in caches]
        state = keras.tree.map_structure(lambda *parts: ops.concatenate(parts, axis=0), *states)
        last, count = (
            np.concatenate([getattr(cache, name) for cache in caches])
            for name in ("last_token", "num_tokens")
        )
        return first._with(state, last, count)

    def save(self, path):
        """Writes one safetensors file, which `load` reads.

        It appears whole: it is written beside `path` first, under a name that begins with a dot,
        and then takes the place of a file that may be there. Where `path` is a symbolic link, that
        is done where it leads to. A folder that is missing is made.

        Args:
            path: string, a file.

        Raises:
            ImportError: safetensors is not installed.
            IsADirectoryError: `path` is a directory.
        """
        write_file(self, path)

    @classmethod
    def load(cls, path, model):
        """A cache from a file, for a model that has the weights it had when the file was written.

        Args:
            path: string, a file that `save` has written, on any backend.
            model: the language model.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no such file, is damaged, or is of another model; says what differs:
                the sizes, the dtype, quantization, low-rank weights (LoRA) or the weights, of
                which 256 numbers each are compared.
        """
        fit, read = read_file(path)
        if not hasattr(getattr(model, "backbone", None), "cache_spec"):
            raise ValueError(
                "`model` must be a language model of `keras_recurrent.models`; got a "
                f"{type(model).__name__}."
            )
        check_fit(fit, model, "path")
        state, last_token, num_tokens, max_length = read(model)
        return cls(state, last_token, num_tokens, max_length, fit)

    def check(self, model):
        """Raises for a model that the cache does not fit, as `load` does."""
        check_fit(self.fit, model)

    def _with(self, state, last_token, num_tokens):
        return type(self)(state, last_token, num_tokens, self.max_length, self.fit)


def key_of(model, cache):
    """The key of a model's next cache: that of the given cache, which was checked, or a new one."""
    return fit_of(model) if cache is None else cache.fit
