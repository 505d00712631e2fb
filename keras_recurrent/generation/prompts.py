"""Validation and tokenization of prompts, and checks of samplers and stop tokens."""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_recurrent.chat.templates import ChatPrompt, tokenize_prompts
from keras_recurrent.checks.arguments import (
    check_positive_integer,
    check_tensor,
    check_unicode,
    is_integer,
)
from keras_recurrent.checks.dtypes import check_dtype
from keras_recurrent.checks.token_ids import check_token_ids
from keras_recurrent.devices.jax_processes import gather_to_numpy
from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.training.samples import check_prompts


class Prompts(NamedTuple):
    """Tokens of the prompts of one call, with space for new tokens.

    Attributes:
        token_ids: int32 `[B, T]`, a NumPy array, padded to the maximum length. With a cache, each
            sequence begins with the last token of the cache, which its state does not contain yet.
        lengths: int32 `[B]`, at least 1.
        limits: int32 `[B]`, maximum length of each sequence, at most T.
        num_context: int32 `[B]`, number of tokens that belong to an earlier call: 1 with a cache,
            else 0.
        cached: a list of int32 arrays, the tokens in the state of the cache.
        is_single: boolean, True if the input was one string and not a list.
    """

    token_ids: Any
    lengths: Any
    limits: Any
    num_context: Any
    cached: Any
    is_single: bool

    @property
    def last_token(self):
        return self.token_ids[np.arange(len(self.lengths)), self.lengths - 1]

    @property
    def tokens(self):
        """All tokens of each sequence, with those of the cache, a list of arrays."""
        return self.with_tokens(self.token_ids, self.lengths)

    def with_tokens(self, token_ids, lengths):
        """As `tokens`, with other tokens `[B, T]` of these lengths in place of the prompts."""
        rows = zip(self.cached, token_ids, lengths, strict=True)
        return [np.concatenate((cached, row[:length])) for cached, row, length in rows]


def parse_prompts(model, inputs, max_length, cache=None, generates=True, max_new_tokens=None):
    """Validates the arguments of a call and returns its `Prompts`.

    Args:
        model: the language model.
        inputs: strings, or tokens if the model has no preprocessor. None: nothing is
            appended to the cache; requires `cache`.
        max_length: integer, maximum number of tokens of a sequence in this call, including the
            prompt. None: the `sequence_length` of the preprocessor, or without a preprocessor the
            padded length T of `inputs`. With `max_new_tokens`, None is no maximum.
        cache: the `GenerationCache` to continue from, or None.
        generates: boolean. False: no tokens are generated, and sequences are padded to the longest
            prompt.
        max_new_tokens: integer, maximum number of new tokens of each sequence, or None.

    Raises:
        ValueError: `inputs` have another type, or their number differs from the sequences of
            `cache`; a prompt is empty, without a cache; a prompt is longer than `max_length`, or
            new tokens would exceed the `max_length` of the cache; `cache` belongs to another model.
    """
    if max_length is not None:
        check_positive_integer("max_length", max_length)
    if max_new_tokens is not None:
        check_positive_integer("max_new_tokens", max_new_tokens)
    check_cache(model, cache)
    length = max_length
    if length is None and inputs is None and model.preprocessor is None:
        length = max_new_tokens
    parse = _parse_tokens if model.preprocessor is None else _parse_texts
    prompts, limit, is_single = parse(model, inputs, length, cache)
    num_context, cached = int(cache is not None), [np.zeros(0, "int32")] * len(prompts)
    if cache is not None:
        if cache.batch_size != len(prompts):
            raise ValueError(
                f"`inputs` must be one text for each sequence of `cache`, {cache.batch_size}; got "
                f"{len(prompts)}. Change the number of sequences with `cache.select`, "
                "`cache.repeat` or `GenerationCache.join`."
            )
        prompts = [[last, *tokens] for last, tokens in zip(cache.last_token, prompts, strict=True)]
        cached = [ids[:-1] for ids in cache.token_ids]
    lengths = np.array([len(tokens) for tokens in prompts], "int32")
    if not generates:
        limit = lengths.max()
    elif max_length is None and max_new_tokens is not None:
        limit = lengths.max() + max_new_tokens
    else:
        limit += num_context
    for number, length in enumerate(lengths):
        if length > limit:
            raise ValueError(
                f"`max_length` is {limit - num_context} tokens, including the prompt, and prompt "
                f"{number} alone has {length - num_context}. Pass a larger `max_length`, or "
                "truncate the prompt."
            )
    limits = np.full_like(lengths, limit)
    if max_new_tokens is not None:
        limits = np.minimum(limits, lengths + max_new_tokens)
    if generates:
        _check_free_length(limits, cache)
    token_ids = np.zeros((len(prompts), limit), "int32")
    for row, tokens in zip(token_ids, prompts, strict=True):
        row[: len(tokens)] = tokens
    context = np.full(len(prompts), num_context, "int32")
    return Prompts(token_ids, lengths, limits, context, cached, is_single)


def check_cache(model, cache):
    """Raises a `ValueError` unless `cache` is None or a `GenerationCache` of the model."""
    if cache is not None:
        check_is_cache(cache)
        cache.check(model)


def check_is_cache(cache):
    """Raises a `ValueError` unless `cache` is a `GenerationCache`."""
    if not isinstance(cache, GenerationCache):
        raise ValueError(
            "`cache` must be a `GenerationCache`, such as `prefill` returns; got a "
            f"{type(cache).__name__}."
        )


def _check_free_length(limits, cache):
    if cache is None or cache.max_length is None:
        return
    over = cache.num_tokens - 1 + limits - cache.max_length
    longest = int(np.argmax(over))
    if over[longest] > 0:
        used = int(cache.num_tokens[longest])
        raise ValueError(
            f"`cache` has a `max_length` of {cache.max_length} tokens, of which sequence {longest} "
            f"has used {used}: {cache.max_length - used} are left, and this call may need "
            f"{limits[longest] - 1}. Pass a smaller `max_length`, or a larger one to `prefill`."
        )


def _parse_texts(model, inputs, max_length, cache):
    preprocessor = model.preprocessor
    limit = max_length or preprocessor.sequence_length
    if inputs is None and cache is not None:
        inputs = "" if cache.batch_size == 1 else [""] * cache.batch_size
    check_prompts(inputs)
    is_single = isinstance(inputs, str) or getattr(inputs, "ndim", 1) == 0
    # NumPy converts the strings of TensorFlow's tensors to bytes.
    texts = [inputs] if isinstance(inputs, str) else np.ravel(np.asarray(inputs, object)).tolist()
    if is_single and cache is not None and cache.batch_size > 1:
        raise ValueError(
            "`inputs` must be a list of one text for each sequence of `cache`, "
            f"{cache.batch_size}; got one string."
        )
    texts = list(map(_as_text, texts))
    for text in texts:
        check_unicode("inputs", text)
    tokenizer = preprocessor.tokenizer
    add_start_token = cache is None and preprocessor.add_start_token
    prompts = tokenize_prompts(tokenizer, texts, add_start_token)
    if cache is None:
        _check_not_empty(map(len, prompts))
    return prompts, limit, is_single


def _as_text(text):
    if isinstance(text, ChatPrompt):
        return text
    return text.decode() if isinstance(text, bytes) else str(text)


def _parse_tokens(model, inputs, max_length, cache):
    if inputs is None and cache is not None:
        if max_length is None:
            raise ValueError(
                "`max_length` or `max_new_tokens` must be the number of tokens to generate if "
                "there are no `inputs`; got None."
            )
        return [[] for _ in range(cache.batch_size)], max_length, False
    check_prompt_tokens(inputs, model.backbone.vocabulary_size, allow_empty=cache is not None)
    token_ids, lengths = tokens_and_lengths(inputs)
    prompts = [row[:length].tolist() for row, length in zip(token_ids, lengths, strict=True)]
    return prompts, max_length or token_ids.shape[1], False


def _check_not_empty(lengths):
    for number, length in enumerate(lengths):
        if not length:
            raise ValueError(
                f"Every prompt must have at least one token; prompt {number} has none. A "
                "preprocessor with `add_start_token=True` adds one, also to an empty string."
            )


def check_prompt_tokens(inputs, vocabulary_size, allow_empty=False):
    """Validates prompts of tokens.

    Args:
        inputs: the `inputs` of `generate`.
        vocabulary_size: integer.
        allow_empty: boolean, True allows prompts without tokens.

    Raises:
        ValueError: `inputs` are not a dictionary of `token_ids` and `padding_mask` `[B, T]`, with
            at least one prompt, ids of the vocabulary and padding only after the prompts.
    """
    if not isinstance(inputs, dict) or set(inputs) != {"token_ids", "padding_mask"}:
        got = sorted(inputs) if isinstance(inputs, dict) else type(inputs).__name__
        raise ValueError(
            "Without a preprocessor, prompts must be a dictionary of `token_ids` and "
            f"`padding_mask`, each [batch, time], one prompt per sequence; got {got}."
        )
    for name in ("token_ids", "padding_mask"):
        check_tensor(name, inputs[name])
    dtype = keras.backend.standardize_dtype(inputs["token_ids"].dtype)
    if "int" not in dtype:
        raise ValueError(f"`token_ids` must be integers; got {dtype}. Cast them first.")
    dtype = keras.backend.standardize_dtype(inputs["padding_mask"].dtype)
    check_dtype("generate", "padding_mask", dtype)
    mask = gather_to_numpy(inputs["padding_mask"]).astype("bool")
    shapes = [tuple(ops.shape(inputs["token_ids"])), mask.shape]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or not shapes[0][0]:
        raise ValueError(
            "`token_ids` and `padding_mask` must both have the shape [batch, time], with at least "
            f"one prompt; got {shapes[0]} and {shapes[1]}."
        )
    if not allow_empty:
        _check_not_empty(mask.sum(axis=1))
    if (mask[:, 1:] > mask[:, :-1]).any():
        raise ValueError(
            "`padding_mask` must be False only after the prompts; got padding before or inside a "
            "prompt. Move the padding to the right, where new tokens are inserted."
        )
    token_ids = gather_to_numpy(inputs["token_ids"])
    check_token_ids("token_ids", token_ids, vocabulary_size, mask)


def check_stop_tokens(ids, vocabulary_size):
    """Raises a `ValueError` unless `ids` is None or a tuple of token ids of the vocabulary."""
    if ids is not None and (not isinstance(ids, (tuple, list)) or not ids):
        raise ValueError(
            "`stop_token_ids` must be a tuple of one or more token ids, or None to generate up to "
            f"the maximum length; got {ids!r}."
        )
    for number in ids or ():
        if not is_integer(number) or not 0 <= number < vocabulary_size:
            raise ValueError(
                "`stop_token_ids` must be token ids, integers from 0 to "
                f"{vocabulary_size - 1}; got {number!r} among them."
            )


def tokens_and_lengths(inputs):
    """Returns the tokens [B, T] of prompts and their lengths [B], as NumPy arrays."""
    token_ids, mask = (gather_to_numpy(inputs[name]) for name in ("token_ids", "padding_mask"))
    return token_ids.astype("int32"), mask.astype("bool").sum(axis=1).astype("int32")
