"""Functions shared by the tokenizers that are a file of a checkpoint."""

import bisect
import contextlib
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


def names_pattern(names):
    """Returns a regular expression of names. Where one begins another, the longer one matches."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"


def private_name():
    """Returns a new name for a special token, of random private characters."""
    return "".join(chr(0x100000 + secrets.randbelow(0xFFFE)) for _ in range(4))


def tokenize_with_special_tokens(tokenizer, text, names):
    """Tokenizes a trusted text, or a list of texts, in which `names` are special tokens."""
    if not isinstance(text, str):
        return [tokenize_with_special_tokens(tokenizer, each, names) for each in text]
    return tokenize_parts(tokenizer, re.split(f"({names_pattern(names)})", text))[0]


def tokenize_parts(tokenizer, parts, ranges=()):
    """Tokenizes a text whose special tokens are given.

    Args:
        tokenizer: any tokenizer.
        parts: strings, plain text and special tokens alternately, as in `ChatPrompt.parts`.
        ranges: pairs of positions in the text. The tokenizer must be of this package.

    Returns:
        A list of ids, and for each range the indices of its first token and after its last one.
        A token belongs to a range if it has a character of the range, or has none and is
        at its beginning, such as the space that SentencePiece adds.
    """
    names = getattr(tokenizer, "_private_names", {})
    # The positions at which parts begin, in the text and with private names.
    merged, begins, private_begins = [""], [0], [0]
    for number, part in enumerate(parts):
        name = names.get(part) if number % 2 else part
        if name is None:
            merged += [part, ""]
        else:
            merged[-1] += name
        begins.append(begins[-1] + len(part))
        private_begins.append(private_begins[-1] + len(name or part))

    ids, offsets, begin = [], [], 0
    for number, part in enumerate(merged):
        if number % 2:
            ids.append(int(tokenizer.token_to_id(part)))
            offsets.append((begin, begin + len(part)))
        elif part and hasattr(tokenizer, "_encode"):
            new, found = tokenizer._encode(part, bool(ranges))
            ids += new
            offsets += ((begin + first, begin + last) for first, last in found)
        elif part:
            ids += map(int, tokenizer.tokenize([part])[0])
        begin += len(part)

    found = []
    for positions in ranges:
        parts_of = [bisect.bisect_right(begins, position) - 1 for position in positions]
        begin, end = (
            private_begins[part] + position - begins[part]
            for part, position in zip(parts_of, positions, strict=True)
        )
        by_begin, by_end = operator.itemgetter(0), operator.itemgetter(1)
        first = min(
            bisect.bisect_right(offsets, begin, key=by_end),
            bisect.bisect_left(offsets, begin, key=by_begin),
        )
        found.append((first, bisect.bisect_left(offsets, end, lo=first, key=by_begin)))
    return ids, found


def tokenize_with_ranges(tokenizer, text, ranges):
    """Tokenizes a string or a `ChatPrompt`; see `tokenize_parts`.

    Tokenizers of other packages do not tell the characters of tokens. They tokenize the ranges, the
    last of which must end with the text, and the texts before them separately.
    """
    if hasattr(tokenizer, "_encode"):
        return tokenize_parts(tokenizer, getattr(text, "parts", [text]), ranges)
    ids, lengths, at = [], [], 0
    for end in itertools.chain.from_iterable(ranges):
        part, at = text[at:end], end
        ids += tokenize_parts(tokenizer, getattr(part, "parts", [part]))[0]
        lengths.append(len(ids))
    return ids, list(zip(lengths[::2], lengths[1::2], strict=True))
