"""Prompts: their validation, tokenization and padding, and lengths of chunks and caches."""

import warnings
from typing import Any, NamedTuple

import numpy as np

from keras_recurrent.checks.arguments import check_positive_integer, check_tensor
from keras_recurrent.checks.dtypes import check_dtype
from keras_recurrent.checks.token_ids import check_token_ids
from keras_recurrent.devices.jax_processes import gather_to_numpy
from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.generation.text import check_not_empty, tokenize_texts
from keras_recurrent.training.samples import describe, is_empty, is_text, no_preprocessor_error

MAX_TOKENS = 2**31 - 1  # of a sequence; the device counts them in 32 bits
PADDED = "a dictionary of `token_ids` and `padding_mask`, each [batch, time]"
MIN_BUCKET, COARSE_FACTOR, FINE_FROM = 64, 4, 1024
MIN_CHUNK, MAX_CHUNKS = 256, 16
MIN_SEQUENCES = 8  # of a chunk; the scan of a single long prompt would leave most of a GPU idle
TOKENS_PER_CHUNK = 16_384  # of the whole batch: some 1.5 GiB for a model of 2 billion parameters


class Prompts(NamedTuple):
    """Tokens of the prompts of one call, and the maximum numbers of new tokens.

    Attributes:
        tokens: a list of int32 arrays, the tokens to process, at least one of each sequence. With
            a cache, the first is the last token of the cache, which its state does not contain yet.
        remaining_tokens: int32 `[B]`, maximum number of new tokens of each sequence.
        max_length: integer, padded length T of the sequences: at least the length of each
            prompt plus its `remaining_tokens`.
        num_context: integer, number of tokens of each sequence that belong to an earlier call: 1
            with a cache, else 0.
        cached: a list of int32 arrays, the tokens in the state of the cache.
        is_single: boolean, True if the result is one text and not a list.
        answers: a NumPy array of integers, the index of the prompt of each answer. None before
            `repeat`.
    """

    tokens: Any
    remaining_tokens: Any
    max_length: int
    num_context: int
    cached: Any
    is_single: bool
    answers: Any = None

    def repeat(self, counts):
        """Returns `Prompts` with `counts`, a list of integers, as the number of answers to each."""
        answers = np.repeat(np.arange(len(self.tokens)), counts)
        return self._replace(answers=answers, is_single=self.is_single and len(answers) == 1)

    @property
    def lengths(self):
        """Lengths of `tokens`, int32 `[B]`."""
        return np.array(list(map(len, self.tokens)), "int32")

    @property
    def token_ids(self):
        """`tokens`, int32 `[B, T]`, padded to the longest."""
        return pad_prompts(self.tokens, self.lengths.max())["token_ids"]

    @property
    def all_tokens(self):
        """Cached and new tokens of each prompt, a list of int32 arrays."""
        return list(map(np.concatenate, zip(self.cached, self.tokens, strict=True)))

    def shown_tokens(self, strip_prompt):
        """Returns the tokens of the prompt with which each result of `generate` begins."""
        if strip_prompt:
            return [[] for _ in self.answers]
        return [self.tokens[index][self.num_context :] for index in self.answers]


def parse_prompts(model, inputs, max_length, cache=None, generates=True, max_new_tokens=None):
    """Returns the `Prompts` of a call; arguments and errors as in `generate`.

    generates: boolean. False: no tokens are generated, and sequences are padded to the longest
    prompt.
    """
    for name, value in (("max_length", max_length), ("max_new_tokens", max_new_tokens)):
        if value is not None:
            check_token_count(name, value)
    if cache is not None:
        check_cache(cache)
        cache.check(model)
    parse = _parse_padded if model.preprocessor is None else _parse_texts
    prompts, default_length, is_single = parse(model, inputs, cache)
    if cache is None:
        check_not_empty("inputs", prompts)
        context = cached = [np.zeros(0, "int32")] * len(prompts)
    else:
        check_batch_size(cache, len(prompts))
        context, cached = cache.last_token[:, None], [ids[:-1] for ids in cache.token_ids]
    pairs = zip(context, prompts, strict=True)  # a token of the cache, and the prompt
    tokens = [np.concatenate(pair).astype("int32") for pair in pairs]
    lengths, num_context = np.array(list(map(len, tokens))), len(context[0])
    if max_length is None and (max_new_tokens is not None or not generates):
        length = int(lengths.max()) + (max_new_tokens or 0)
    elif max_length is None and default_length is None:
        raise ValueError(
            "`max_length` or `max_new_tokens` must be the number of tokens to generate if there "
            "are no `inputs`; got None."
        )
    else:
        length = int(max_length or default_length) + num_context
    check_lengths(lengths - num_context, length - num_context)
    remaining_tokens = length - lengths
    if max_new_tokens is not None:
        remaining_tokens = np.minimum(remaining_tokens, max_new_tokens)
    if generates and cache is not None and cache.max_length is not None:
        _check_remaining_tokens(cache, lengths - 1 + remaining_tokens)
    remaining_tokens = remaining_tokens.astype("int32")
    return Prompts(tokens, remaining_tokens, length, num_context, cached, is_single)


def pad_prompts(tokens, length, pad_token_id=0):
    """Returns a dictionary of `token_ids` and `padding_mask`, `[B, length]`.

    tokens: lists or arrays of at most `length` token ids.
    """
    padding_mask = np.arange(length) < np.array(list(map(len, tokens)))[:, None]
    token_ids = np.full(padding_mask.shape, pad_token_id, "int32")
    token_ids[padding_mask] = np.concatenate(tokens)
    return {"token_ids": token_ids, "padding_mask": padding_mask}


def check_token_count(name, count):
    """Raises a `ValueError` unless `count` is a possible number of tokens of a sequence."""
    check_positive_integer(name, count)
    if count > MAX_TOKENS:
        raise ValueError(f"`{name}` must be at most {MAX_TOKENS} tokens; got {count}.")


def check_cache(cache):
    """Raises a `ValueError` unless `cache` is a `GenerationCache`."""
    if not isinstance(cache, GenerationCache):
        raise ValueError(
            "`cache` must be a `GenerationCache`, such as `prefill` returns; got a "
            f"{type(cache).__name__}."
        )


def check_batch_size(cache, num_prompts, name="inputs", kind="text"):
    """Raises a `ValueError` unless there is one prompt for each sequence of `cache`."""
    if cache.batch_size != num_prompts:
        raise ValueError(
            f"`{name}` must be one {kind} for each sequence of `cache`, {cache.batch_size}; got "
            f"{num_prompts}. Change the number of sequences with `cache.select`, `cache.repeat` or "
            "`GenerationCache.join`."
        )


def check_lengths(lengths, max_length):
    """Raises a `ValueError` if a prompt has more than `max_length` tokens."""
    for number, length in enumerate(lengths):
        if length > max_length:
            raise ValueError(
                f"`max_length` is {max_length} tokens, including prompt and answer, and prompt "
                f"{number} alone has {length}. Pass a larger `max_length`, or shorten the prompt."
            )


def _check_remaining_tokens(cache, num_tokens):
    """Raises a `ValueError` if the cache has no space for `num_tokens` further tokens, `[B]`."""
    left = cache.max_length - cache.num_tokens
    row = int(np.argmax(num_tokens - left))
    if num_tokens[row] > left[row]:
        raise ValueError(
            f"`cache` has a `max_length` of {cache.max_length} tokens, of which sequence {row} has "
            f"used {cache.num_tokens[row]}: {left[row]} are left, and this call may need "
            f"{num_tokens[row]}. Pass a smaller `max_length`, or a larger one to `prefill`."
        )


def _parse_texts(model, inputs, cache):
    """Returns the tokens of texts, the default of `max_length`, and `Prompts.is_single`."""
    if inputs is None and cache is not None:
        inputs = "" if cache.batch_size == 1 else [""] * cache.batch_size
    prompts, is_single = tokenize_texts(model.preprocessor, inputs, has_cache=cache is not None)
    return prompts, model.preprocessor.sequence_length, is_single


def _parse_padded(model, inputs, cache):
    """Returns the tokens of padded prompts, the default of `max_length` or None, and False."""
    if inputs is None and cache is not None:
        return [[]] * cache.batch_size, None, False
    if not is_empty(inputs) and (isinstance(inputs, (str, bytes)) or is_text(inputs)):
        raise no_preprocessor_error("inputs", model.preprocessor_cls, f"pass {PADDED}")
    if not isinstance(inputs, dict) or set(inputs) != {"token_ids", "padding_mask"}:
        raise ValueError(
            f"`inputs` must be {PADDED}, one prompt per sequence, if the model has no "
            f"preprocessor; got {describe(inputs)}."
        )
    for name, value in inputs.items():
        check_tensor(name, value)
    token_ids, mask = (gather_to_numpy(inputs[name]) for name in ("token_ids", "padding_mask"))
    check_dtype("generate", "padding_mask", mask.dtype.name)
    if token_ids.dtype.kind not in "iu":
        raise ValueError(f"`token_ids` must be integers; got {token_ids.dtype}. Cast them first.")
    if token_ids.shape != mask.shape or mask.ndim != 2 or not len(mask):
        raise ValueError(
            "`token_ids` and `padding_mask` must both have the shape [batch, time], with at least "
            f"one prompt; got {token_ids.shape} and {mask.shape}."
        )
    mask = mask.astype("bool")
    prompts = [ids[real] for ids, real in zip(token_ids, mask, strict=True)]
    if (mask[:, 1:] > mask[:, :-1]).any():
        raise ValueError(
            "`padding_mask` must be False only after the prompts; got padding before or inside a "
            "prompt. Move the padding to the right, where new tokens are inserted."
        )
    check_token_ids("token_ids", token_ids, model.backbone.vocabulary_size, mask)
    return prompts, mask.shape[1], False


# Sequence lengths that share a program, chunk lengths of prompts, and capacities of caches.


def bucket(length):
    """Returns the padded length of sequences: 64, 256, 1024, then powers of two.

    Lengths of 1 to 32,768 tokens take at most eight programs. From 1024 on, the caches of global
    attention have at most twice the capacity that is needed.
    """
    padded = MIN_BUCKET
    while padded < length:
        padded *= COARSE_FACTOR if padded < FINE_FROM else 2
    return padded


def max_chunk_length(batch_size):
    """Returns the maximum number of tokens of each sequence in a chunk, a power of two."""
    share = max(MIN_CHUNK, TOKENS_PER_CHUNK // batch_size)
    return 1 << share.bit_length() - 1


def max_sequences(length):
    """Returns the maximum number of sequences of `length` tokens that torch processes together."""
    return max(MIN_SEQUENCES, TOKENS_PER_CHUNK // max(1, length))


def chunk_length(batch_size, length):
    """Returns the number of tokens of each sequence in a chunk, for sequences padded to `length`.

    It is at least 1/16 of `length`, within the limits, so that a program has few iterations.
    """
    return min(length, max_chunk_length(batch_size), max(MIN_CHUNK, length // MAX_CHUNKS))


def check_max_length(model, length):
    """Raises an error for more than `max_num_tokens`; warns beyond `max_position_embeddings`."""
    model.backbone.check_num_tokens(length)
    trained = model.backbone.max_position_embeddings
    if trained is not None and length > trained:
        warnings.warn(
            f"The model was trained for positions of up to {trained} tokens "
            f"(`max_position_embeddings`), but sequences may have {length}: text after position "
            f"{trained} may be wrong. Generate fewer tokens, or shorten the prompt.",
            stacklevel=2,
        )


def cache_max_length(model, length, keep):
    """Returns the `max_length` of a new cache for sequences of at most `length` tokens, or None.

    keep: boolean, True if the cache is used after this call. It is then unlimited unless a block
        attends to all tokens.

    Raises:
        ValueError: the backbone does not take sequences of this length.
    """
    if keep and model.backbone.keeps_state:
        return None
    check_max_length(model, length)
    limit = model.backbone.max_num_tokens
    return bucket(length) if limit is None else min(bucket(length), limit)
