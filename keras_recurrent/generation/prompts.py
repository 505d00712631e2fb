"""What language models are asked to go on from, and its checks."""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_recurrent.checks.arguments import check_positive_integer, check_tensor, is_finite_number
from keras_recurrent.checks.dtypes import check_dtype
from keras_recurrent.checks.token_ids import check_token_ids
from keras_recurrent.devices.jax_processes import gather_to_numpy
from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.training.samples import check_prompts


class Prompts(NamedTuple):
    """Rows of tokens to go on from, behind what a cache has seen.

    Attributes:
        token_ids: int32 `[B, T]`, a NumPy array. Behind a cache its last token comes first.
        lengths: int32 `[B]`, at least 1.
        given: int32 `[B]`, how many tokens of each row are no part of this call: 1 behind a cache.
        seen: int64 `[B]`, how many tokens the cache has seen.
        single: boolean, whether there was one string, and not a list.
    """

    token_ids: Any
    lengths: Any
    given: Any
    seen: Any
    single: bool

    @property
    def last_token(self):
        return self.token_ids[np.arange(len(self.lengths)), self.lengths - 1]

    @property
    def num_tokens(self):
        return self.seen + self.lengths

    @property
    def room(self):
        return self.token_ids.shape[1] - self.lengths


def find_prompts(model, inputs, max_length, cache=None, writes=True):
    """The `Prompts` of a call.

    Args:
        model: the language model.
        inputs: strings, or tokens where it has no preprocessor; None: nothing, behind a cache.
        max_length: integer, the tokens of a row that are given and written in this call; None: as
            the preprocessor says. Rows of tokens say it themselves, whatever stands here, as in
            KerasHub.
        cache: the `GenerationCache` to go on from, or None.
        writes: whether there will be new tokens; if not, rows are as long as the longest prompt.

    Raises:
        ValueError: inputs of another kind or number than the rows of the cache, empty prompts where
            there is no cache, prompts longer than `max_length`, or no room left; a cache of another
            model.
    """
    if max_length is not None:
        check_positive_integer("max_length", max_length)
    check_cache(model, cache)
    if model.preprocessor is None:
        rows, limit, single = _tokens(model, inputs, max_length, cache)
    else:
        rows, limit, single = _texts(model, inputs, max_length, cache)
    if not writes:
        limit = max(map(len, rows))
    seen = np.zeros(len(rows), "int64")
    if cache is not None:
        if cache.batch_size != len(rows):
            raise ValueError(
                f"`inputs` must be one text for each row of `cache`, {cache.batch_size}; got "
                f"{len(rows)}. `cache.select`, `cache.repeat` and `GenerationCache.join` make "
                "other rows."
            )
        rows = [[last, *row] for last, row in zip(cache.last_token, rows, strict=True)]
        seen, limit = cache.num_tokens - 1, limit + 1
    lengths = np.array([len(row) for row in rows], "int32")
    for number, length in enumerate(lengths):
        if length > limit:
            behind = int(cache is not None)
            raise ValueError(
                f"`max_length` is {limit - behind} tokens, prompt and answer together, and prompt "
                f"{number} alone has {length - behind}. Ask for a larger `max_length`, or cut the "
                "prompt."
            )
    if writes:
        _check_room(seen, limit, cache)
    token_ids = np.zeros((len(rows), limit), "int32")
    for place, tokens in zip(token_ids, rows, strict=True):
        place[: len(tokens)] = tokens
    given = np.full(len(rows), int(cache is not None), "int32")
    return Prompts(token_ids, lengths, given, seen, single)


def check_cache(model, cache):
    """Raises for what is neither None nor a `GenerationCache` that the model fits."""
    if cache is None:
        return
    if not isinstance(cache, GenerationCache):
        raise ValueError(
            "`cache` must be a `GenerationCache`, as `prefill` returns it; got a "
            f"{type(cache).__name__}."
        )
    cache.check(model)


def _check_room(seen, limit, cache):
    if cache is None or cache.max_length is None:
        return
    row = int(np.argmax(seen))
    left = cache.max_length - int(seen[row]) - 1
    if limit - 1 > left:
        raise ValueError(
            f"`cache` has room for {cache.max_length} tokens a row, of which row {row} has used "
            f"{int(seen[row]) + 1}: {left} are left, and this call may need {limit - 1}. Ask for a "
            "smaller `max_length`, or begin with a larger one in `prefill`."
        )


def _texts(model, inputs, max_length, cache):
    preprocessor = model.preprocessor
    limit = max_length or preprocessor.sequence_length
    if inputs is None and cache is not None:
        inputs = "" if cache.batch_size == 1 else [""] * cache.batch_size
    check_prompts(inputs)
    single = isinstance(inputs, str) or getattr(inputs, "ndim", 1) == 0
    # Strings may come in tensors of TensorFlow, which NumPy reads as bytes.
    texts = [inputs] if isinstance(inputs, str) else np.ravel(np.asarray(inputs, object)).tolist()
    if single and cache is not None and cache.batch_size > 1:
        raise ValueError(
            f"`inputs` must be a list of one text for each row of `cache`, {cache.batch_size}; got "
            "one string."
        )
    tokenizer = preprocessor.tokenizer
    rows = [np.asarray(tokens).tolist() for tokens in tokenizer(list(map(_as_text, texts)))]
    if cache is None and preprocessor.add_start_token:
        rows = [[tokenizer.start_token_id, *row] for row in rows]
    if cache is None:
        _check_not_empty(map(len, rows))
    return rows, limit, single


def _as_text(text):
    return text.decode() if isinstance(text, bytes) else str(text)


def _tokens(model, inputs, max_length, cache):
    if inputs is None and cache is not None:
        if max_length is None:
            raise ValueError(
                "`max_length` must say how many tokens to write where there are no `inputs`."
            )
        return [[] for _ in range(cache.batch_size)], max_length, False
    check_rows(inputs, model.backbone.vocabulary_size, empty=cache is not None)
    token_ids, lengths = tokens_and_lengths(inputs)
    rows = [row[:length].tolist() for row, length in zip(token_ids, lengths, strict=True)]
    return rows, token_ids.shape[1], False


def _check_not_empty(lengths):
    for number, length in enumerate(lengths):
        if not length:
            raise ValueError(
                "Every prompt needs at least one token to go on from; row "
                f"{number} has none. A preprocessor with `add_start_token=True` gives it one, also "
                "for an empty string."
            )


def check_rows(inputs, vocabulary_size, empty=False):
    """Raises for what is no dictionary of tokens to go on from.

    Args:
        inputs: what `generate` got.
        vocabulary_size: integer.
        empty: whether rows may have no token.
    """
    if not isinstance(inputs, dict) or set(inputs) != {"token_ids", "padding_mask"}:
        got = sorted(inputs) if isinstance(inputs, dict) else type(inputs).__name__
        raise ValueError(
            "Without a preprocessor, prompts are a dictionary of `token_ids` and `padding_mask`, "
            f"each [batch, time], one document a row; got {got}."
        )
    for name in ("token_ids", "padding_mask"):
        check_tensor(name, inputs[name])
    dtype = keras.backend.standardize_dtype(inputs["token_ids"].dtype)
    if "int" not in dtype:
        raise ValueError(f"`token_ids` must be integers; got {dtype}. Cast them first.")
    dtype = keras.backend.standardize_dtype(inputs["padding_mask"].dtype)
    check_dtype("generate", "padding_mask", dtype)
    real = gather_to_numpy(inputs["padding_mask"]).astype("bool")
    shapes = [tuple(ops.shape(inputs["token_ids"])), real.shape]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or not shapes[0][0]:
        raise ValueError(
            "`token_ids` and `padding_mask` must both have the shape [batch, time], with at least "
            f"one prompt; got {shapes[0]} and {shapes[1]}."
        )
    if not empty:
        _check_not_empty(real.sum(axis=1))
    if (real[:, 1:] > real[:, :-1]).any():
        raise ValueError(
            "`padding_mask`: prompts must stand at the left of their rows, without gaps. Move the "
            "padding to the right; new tokens are written there."
        )
    token_ids = gather_to_numpy(inputs["token_ids"])
    check_token_ids("token_ids", token_ids, vocabulary_size, real)


def check_sampler(sampler, vocabulary_size):
    """Raises for what is no sampler, and for numbers of KerasHub's that choose no token."""
    kind = type(sampler).__name__
    if isinstance(sampler, type) or not hasattr(sampler, "get_next_token"):
        raise ValueError(
            "`sampler` must be a `keras_hub.samplers.Sampler`, such as `TopKSampler(k=5)`, or the "
            f"name of one, such as 'top_k'; got {sampler!r}."
        )
    if not type(sampler).__module__.startswith("keras_hub."):
        return
    all_tokens = f"an integer from 1 to {vocabulary_size}, as many tokens as the vocabulary has"
    for name, fits, most, wanted in (
        ("k", _is_count, vocabulary_size, all_tokens),
        ("num_beams", _is_count, np.inf, "an integer from 1 on"),
        ("temperature", _is_measure, np.inf, "a number above 0"),
        ("p", _is_measure, 1, "a number above 0, at most 1"),
    ):
        number = getattr(sampler, name, None)
        if number is not None and not (fits(number) and number <= most):
            raise ValueError(
                f"`sampler`: `{name}` of {kind} must be {wanted}; got {number!r}. 'greedy' takes "
                "the likeliest token each time."
            )


def _is_integer(number):
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def _is_count(number):
    return _is_integer(number) and number >= 1


def _is_measure(number):
    return is_finite_number(number) and number > 0


def check_stop_tokens(ids, vocabulary_size):
    """Raises for what is neither None nor a tuple of ids that the vocabulary has."""
    if ids is not None and (not isinstance(ids, (tuple, list)) or not ids):
        raise ValueError(
            "`stop_token_ids` must be a tuple of one or more token ids, or None to fill all rows; "
            f"got {ids!r}."
        )
    for number in ids or ():
        if not _is_integer(number) or not 0 <= number < vocabulary_size:
            raise ValueError(
                "`stop_token_ids` must be token ids, integers from 0 to "
                f"{vocabulary_size - 1}; got {number!r} among them, which nothing would stop at."
            )


def tokens_and_lengths(inputs):
    """The tokens [B, T] of prompts, and their lengths [B]: NumPy arrays."""
    token_ids, mask = (gather_to_numpy(inputs[name]) for name in ("token_ids", "padding_mask"))
    return token_ids.astype("int32"), mask.astype("bool").sum(axis=1).astype("int32")
