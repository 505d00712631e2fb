"""Functions shared by the tokenizers that are a file of a checkpoint."""

import bisect
import contextlib
import functools
import itertools
import operator
import re
import secrets

from keras_recurrent import compat


@contextlib.contextmanager
def describe_errors(path):
    """Re-raises errors of any package, other than ImportError, as a ValueError with the path."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"No tokenizer can be made of {path}: {error}") from error


def load_from_preset(cls, preset, argument, **kwargs):
    """Returns the tokenizer of a preset, which must be a `cls` that has its file.

    Args:
        cls: class of the tokenizer.
        preset: string, a name, a directory or `hf://owner/repository`.
        argument: string, the attribute of `cls` for the file, and the argument of `cls` that sets
            it.
        **kwargs: arguments of `cls`.

    Raises:
        ValueError: the preset has another tokenizer, or none.
    """
    tokenizer = compat.installed_preset_loader(preset).load_tokenizer(cls, **kwargs)
    if not isinstance(tokenizer, cls):
        raise ValueError(f"The tokenizer of {preset!r} is a `{type(tokenizer).__name__}`.")
    if getattr(tokenizer, argument) is None:
        raise ValueError(f"{preset!r} has no {cls.file_description}. Pass one as `{argument}`.")
    return tokenizer


# Shorter names of random characters could be guessed.
MIN_PRIVATE = 3


def names_pattern(names):
    """Returns a regular expression of names. Where one begins another, the longer one matches."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"


def private_name(token):
    """Returns a new name for a special token: as many random private characters."""
    return "".join(chr(0x100000 + secrets.randbelow(0xFFFE)) for _ in token)


def tokenize_with_special_tokens(tokenizer, text, names):
    """Tokenizes a trusted text, or a list of texts, in which `names` are special tokens."""
    if not isinstance(text, str):
        return [tokenize_with_special_tokens(tokenizer, each, names) for each in text]
    return tokenize_parts(tokenizer, re.split(f"({names_pattern(names)})", text))[0]


def tokenize_parts(tokenizer, parts, positions=()):
    """Tokenizes a text whose special tokens are given.

    Args:
        tokenizer: any tokenizer.
        parts: strings, plain text and special tokens alternately, as in `ChatPrompt.parts`.
        positions: increasing positions in the text.

    Returns:
        A list of ids, and for each position the index of the first token that ends after it, or
        begins at it without a character, such as the space that SentencePiece adds.
    """
    names = getattr(tokenizer, "_private_names", {})
    encode = getattr(tokenizer, "_encode", functools.partial(_encode_pieces, tokenizer))
    merged = [""]
    for number, part in enumerate(parts):
        if number % 2 and part not in names:
            merged += [part, ""]
        else:
            merged[-1] += names[part] if number % 2 else part
    ids, indices, begin = [], [], 0
    for number, part in enumerate(merged):
        inside = [at - begin for at in positions if begin <= at < begin + len(part)]
        if number % 2:
            new, found = [int(tokenizer.token_to_id(part))], [0] * len(inside)
        elif part:
            new, found = encode(part, inside)
        else:
            continue
        indices += (len(ids) + index for index in found)
        ids += new
        begin += len(part)
    return ids, indices + [len(ids)] * (len(positions) - len(indices))


def find_tokens(offsets, positions):
    """Returns the indices of `tokenize_parts` for the begin and end of each token."""
    begin, end = operator.itemgetter(0), operator.itemgetter(1)
    return [
        min(bisect.bisect_right(offsets, at, key=end), bisect.bisect_left(offsets, at, key=begin))
        for at in positions
    ]


def _encode_pieces(tokenizer, text, positions):
    """Tokenizes the texts between positions separately.

    Tokenizers of KerasHub do not tell the characters of tokens.
    """
    ids, indices = [], []
    for begin, end in itertools.pairwise([0, *positions, len(text)]):
        if begin < end:
            ids += map(int, tokenizer.tokenize([text[begin:end]])[0])
        indices.append(len(ids))
    return ids, indices[:-1]
