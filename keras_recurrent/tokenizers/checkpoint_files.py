"""Base classes of tokenizers, and functions shared by those that are a file of a checkpoint."""

import bisect
import contextlib
import functools
import itertools
import operator
import re
import secrets

from keras_recurrent import compat
from keras_recurrent.atomic_files import AtomicPreset
from keras_recurrent.tokenizers.plain import SPECIAL_TOKENS


@contextlib.contextmanager
def describe_errors(path):
    """Re-raises errors of any package, other than ImportError, as a ValueError with the path."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"No tokenizer can be made of {path}: {error}") from error


# Shorter names of random characters could be guessed.
MIN_PRIVATE = 3


def names_pattern(names):
    """Returns a regular expression of names. Where one begins another, the longer one matches."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"


def template_pattern(tokenizer):
    """Returns a regular expression of the special tokens that a trusted text may contain."""
    core = getattr(tokenizer, "_core", None)
    return names_pattern(tokenizer.special_tokens if core is None else core.template_tokens)


def private_name(token):
    """Returns a new name for a special token: as many random private characters."""
    return "".join(chr(0x100000 + secrets.randbelow(0xFFFE)) for _ in token)


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
    core = getattr(tokenizer, "_core", None)
    names = {} if core is None else core.private_names
    encode = core.encode_trusted if core else functools.partial(_encode_pieces, tokenizer)
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


class TrustedTexts(AtomicPreset):
    """Mixin of tokenizers that find special tokens in trusted texts."""

    @property
    def _core(self):
        """The `PlainTokenizer` with the tokens of this one."""
        raise NotImplementedError

    @property
    def special_tokens(self):
        """List of the special tokens, such as the start, end and padding token."""
        return self._core.special_tokens

    @property
    def special_token_ids(self):
        """List of the ids of `special_tokens`. They are removed from generated text."""
        return self._core.special_token_ids

    def vocabulary_size(self):
        """Returns the largest id plus one."""
        return self._core.vocabulary_size()

    def id_to_token(self, id):
        """Returns the token of an id. The token of a byte is the character of its code."""
        return self._core.id_to_token(id)

    def token_to_id(self, token):
        """Returns the id of a token."""
        return self._core.token_to_id(token)

    def tokenize_with_special_tokens(self, text):
        """Tokenizes a trusted text, such as a rendered chat template, with its special tokens.

        Args:
            text: a string, or a list of strings.

        Returns:
            A list of ids, or a list of lists.
        """
        if not isinstance(text, str):
            return [self.tokenize_with_special_tokens(each) for each in text]
        return tokenize_parts(self, re.split(f"({template_pattern(self)})", text))[0]


class CheckpointTokenizer(TrustedTexts):
    """Mixin of tokenizers that are a file of a checkpoint.

    `file_argument` is the attribute for the file, and the argument of the constructor that sets it.
    """

    file_argument: str
    file_description: str

    def _copy_special_tokens(self, file):
        """Copies the special tokens and their ids of a `PlainTokenizer`, or sets all to None."""
        for name in SPECIAL_TOKENS:
            for attribute in (name, f"{name}_id"):
                setattr(self, attribute, file and getattr(file, attribute))

    @classmethod
    def from_preset(cls, preset, **kwargs):
        """Loads the tokenizer of a checkpoint or of a directory of `save_to_preset`.

        Raises:
            ValueError: the preset has another tokenizer, or none.
        """
        tokenizer = compat.installed_preset_loader(preset).load_tokenizer(cls, **kwargs)
        if not isinstance(tokenizer, cls):
            raise ValueError(f"The tokenizer of {preset!r} is a `{type(tokenizer).__name__}`.")
        if getattr(tokenizer, cls.file_argument) is None:
            raise ValueError(
                f"{preset!r} has no {cls.file_description}. Pass one as `{cls.file_argument}`."
            )
        return tokenizer
