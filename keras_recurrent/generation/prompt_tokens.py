"""Token ids of prompts and stop tokens, from text or from integers."""

import numpy as np

from keras_recurrent.chat.templates import tokenize_prompts
from keras_recurrent.checks.arguments import check_unicode
from keras_recurrent.checks.token_ids import check_token_ids
from keras_recurrent.generation.text import hidden_stop_tokens
from keras_recurrent.training.samples import as_texts, describe, is_empty, is_text

MIN_TOKENS = 32  # minimum distance of saved ends of messages from the previous saved state


def parse_prompt(preprocessor, vocabulary_size, prompt):
    """Returns the tokens of one prompt, an int32 array; `prompt` is a string or token ids.

    preprocessor: that of the model. If None, `prompt` must be token ids.
    """
    if not isinstance(prompt, str):
        kinds = "a string, a list of messages, or a list of at least one token id"
        return parse_token_ids("prompt", prompt, vocabulary_size, kinds, 1)
    if preprocessor is None:
        raise ValueError(
            "`prompt` is text, and the model has no preprocessor to tokenize it. Pass token ids, "
            "or `preprocessor=` when you make the model."
        )
    prompts, _ = tokenize_texts(preprocessor, prompt, name="prompt")
    check_not_empty("prompt", prompts)
    return np.array(prompts[0], "int32")


def parse_token_ids(name, ids, vocabulary_size, kinds="a list of token ids", min_length=0):
    """Returns token ids as an int32 array.

    Args:
        name: string, the argument that errors name.
        ids: a list or an array of integers.
        vocabulary_size: integer.
        kinds: string, the accepted kinds of values, for the error.
        min_length: integer, minimum number of ids.

    Raises:
        ValueError: `ids` are not integers of one dimension, are fewer than `min_length`, or outside
            the vocabulary.
    """
    try:
        tokens = np.array(ids)
    except ValueError:  # lists of different lengths
        tokens = np.array(None)
    is_list = tokens.ndim == 1 and (not tokens.size or tokens.dtype.kind in "iu")
    if not is_list or len(tokens) < min_length:
        raise ValueError(f"`{name}` must be {kinds}; got {ids!r:.200}.")
    check_token_ids(name, tokens, vocabulary_size)
    return tokens.astype("int32")


def tokenize_texts(preprocessor, inputs, name="inputs", has_cache=False):
    """Validates and tokenizes prompts.

    Args:
        preprocessor: the preprocessor of the model.
        inputs: a string or several strings, as in `generate`.
        name: string, the argument that errors name.
        has_cache: boolean, True if the texts follow a cache and get no start token.

    Returns:
        A list of token ids for each prompt, and a boolean, True for one string.
    """
    if is_empty(inputs):
        raise ValueError(f"`{name}` must hold at least one prompt; got none.")
    if not isinstance(inputs, str) and not is_text(inputs):
        raise ValueError(
            f"`{name}` must be one or several strings if the model has a preprocessor; got "
            f"{describe(inputs)}. Pass tokens to a model with `preprocessor=None`; decode bytes "
            "with `bytes.decode`."
        )
    is_single = isinstance(inputs, str) or getattr(inputs, "ndim", 1) == 0
    texts = [inputs] if isinstance(inputs, str) else np.ravel(inputs) if is_single else inputs
    texts = as_texts(texts)
    for text in texts:
        check_unicode(name, text)
    add_start_token = preprocessor.add_start_token and not has_cache
    return tokenize_prompts(preprocessor.tokenizer, texts, add_start_token), is_single


def parse_stop_token_ids(preprocessor, vocabulary_size, ids):
    """Returns `stop_token_ids` of `generate` as a tuple, which is empty for None."""
    if isinstance(ids, str) and ids == "auto":
        if preprocessor is None:
            raise ValueError(
                "`stop_token_ids` must be a tuple of token ids, or None to generate up to the "
                'maximum length; got "auto", which requires a preprocessor. (A checkpoint has '
                "none if it has no tokenizer file.)"
            )
        tokenizer = preprocessor.tokenizer
        ids = [tokenizer.end_token_id]
        if hasattr(tokenizer, "end_token2_id"):  # as in KerasHub's `generate`
            ids.append(tokenizer.end_token2_id)
        ids = list(dict.fromkeys([*ids, *hidden_stop_tokens(preprocessor)]))
    if ids is None:
        return ()
    kinds = "a tuple of one or more token ids, or None to generate up to the maximum length"
    return tuple(parse_token_ids("stop_token_ids", ids, vocabulary_size, kinds, 1).tolist())


def check_not_empty(name, prompts):
    """Raises a `ValueError` if a prompt has no token."""
    lengths = list(map(len, prompts))
    if 0 in lengths:
        raise ValueError(
            f"`{name}` must have at least one token; prompt {lengths.index(0)} has none. A "
            "preprocessor with `add_start_token=True` adds one, also to an empty string."
        )
