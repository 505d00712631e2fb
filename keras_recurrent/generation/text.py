"""Tokens of prompts, the text of new tokens, and stop strings, which end the text."""

import bisect
import codecs
import functools
import re
from typing import Any

import numpy as np

from keras_recurrent.chat.templates import tokenize_prompts
from keras_recurrent.checks.arguments import check_unicode
from keras_recurrent.checks.token_ids import check_token_ids
from keras_recurrent.tokenizers.sentence_piece_file import decoding_errors
from keras_recurrent.training.samples import as_texts, describe, is_empty, is_text

REPLACEMENT = "\ufffd"  # text of bytes that are an invalid or incomplete character
LONGEST_CHARACTER = 4  # bytes, each one token at most
MAX_TOKENS = 64  # whose text is converted again for a further token
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # of SentencePiece, and of BPE with byte fallback
# Characters that byte-level BPE has for bytes: the printable ones, then others.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_LEVEL = {chr(byte): byte for byte in PRINTABLE}
BYTE_LEVEL |= {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*PRINTABLE}))}
DECODER = codecs.getincrementaldecoder("utf-8")
# Classes whose texts of tokens are known, if no subclass overrides these methods.
DETOKENIZERS = {"BPETokenizer", "ByteTokenizer", "PlainTokenizer", "SentencePieceTokenizer"}
PREPROCESSORS = {"CausalLMPreprocessor", "PlainPreprocessor"}
MAX_STRINGS, MAX_LENGTH = 16, 1024  # of stop strings, and of each in characters
MIN_TOKENS = 32  # minimum tokens between a saved end of a message and the saved state before it


# --- Tokens of prompts, and stop tokens ---


def parse_prompt(preprocessor, vocabulary_size, prompt):
    """Returns the tokens of one prompt, an int32 array; `prompt` is a string or token ids.

    preprocessor: the preprocessor of the model. If None, `prompt` must be token ids.
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
    if isinstance(inputs, str):
        texts, is_single = [inputs], True
    elif is_empty(inputs):
        raise ValueError(f"`{name}` must hold at least one prompt; got none.")
    elif not is_text(inputs):
        raise ValueError(
            f"`{name}` must be one or several strings if the model has a preprocessor; got "
            f"{describe(inputs)}. Pass tokens to a model with `preprocessor=None`; decode bytes "
            "with `bytes.decode`."
        )
    else:
        is_single = getattr(inputs, "ndim", 1) == 0
        texts = as_texts(np.ravel(inputs) if is_single else inputs)
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


def hidden_stop_tokens(preprocessor):
    """Returns the ids of the tokens that end an answer, a tuple, which its text does not show."""
    return tuple(getattr(preprocessor, "stop_token_ids", ()))


# --- Text of tokens ---


def text_of(preprocessor, token_ids):
    """Returns the text of tokens, with U+FFFD for invalid bytes."""
    try:
        return _detokenize(preprocessor, token_ids)
    except UnicodeDecodeError as error:  # of a tokenizer that is strict
        return error.object.decode("utf-8", "replace")


def _detokenize(preprocessor, token_ids):
    """Returns the text of tokens; may raise a UnicodeDecodeError."""
    if not len(token_ids):
        return ""
    row = np.array([token_ids], "int32")
    batch = {"token_ids": row, "padding_mask": np.ones_like(row, dtype=bool)}
    (text,) = preprocessor.generate_postprocess(batch)
    return text if isinstance(text, str) else bytes(text).decode("utf-8", "replace")


def token_bytes(preprocessor):
    """Returns the `TokenBytes` of a preprocessor, which stores it."""
    attributes = vars(preprocessor)  # Keras would track, and copy, an attribute that is set
    found = attributes.get("_token_bytes")
    if found is None or found.tokenizer is not preprocessor.tokenizer:
        found = attributes["_token_bytes"] = TokenBytes(preprocessor)
    return found


class TokenBytes(dict):
    """Bytes that tokens add to a text after another token, `{id: bytes}`, found when first used.

    Attributes:
        tokenizer: that of the preprocessor.
        errors: string, the error handler of the codec that converts the bytes of all tokens to
            their text. None: the text of a token may depend on other tokens, and bytes are unknown.
    """

    def __init__(self, preprocessor):
        super().__init__()
        self._preprocessor, self.tokenizer = preprocessor, preprocessor.tokenizer
        self._core: Any = getattr(self.tokenizer, "_core", None)
        self._without_text = set(getattr(self.tokenizer, "special_token_ids", ()))
        self.errors = _decoding_errors(preprocessor)

    @functools.cached_property
    def _context(self):
        """Id and text of a token, after which no tokenizer drops a space."""
        tokens = ((id, self._text([id])) for id in range(self.tokenizer.vocabulary_size()))
        return next(((id, text) for id, text in tokens if text.isalnum()), (None, ""))

    def _text(self, ids):
        ids = [id for id in ids if id is not None and id not in self._without_text]
        if self.errors is None or not ids:
            return text_of(self._preprocessor, ids)
        return self.tokenizer.detokenize([ids])[0]

    def __missing__(self, token):
        if token in self._without_text:
            data = b""
        elif (data := self._core and self._core.bytes_of(token)) is None:
            context, before = self._context
            text = self._text([context, token])[len(before) :]
            data = text.encode()
            if REPLACEMENT in text:
                data = self._incomplete_bytes(token) or data
        self[token] = data
        return data

    def _incomplete_bytes(self, token):
        """Returns the bytes of a token that are not whole characters, or None."""
        try:
            name = self.tokenizer.id_to_token(token)
        except ValueError:  # the file has no such token
            return None
        if BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(name[3:5])
        is_byte_level = self._core and self._core.spells_bytes and BYTE_LEVEL.keys() >= set(name)
        return bytes(BYTE_LEVEL[c] for c in name) if is_byte_level else None


def _decoding_errors(preprocessor):
    """Returns `TokenBytes.errors`."""
    tokenizer = preprocessor.tokenizer
    detokenizer = _owner(tokenizer, "detokenize", DETOKENIZERS)
    if detokenizer is None or not _owner(preprocessor, "generate_postprocess", PREPROCESSORS):
        return None
    if (core := getattr(tokenizer, "_core", None)) is not None:
        return core.errors
    is_sentence_piece = detokenizer == "SentencePieceTokenizer"
    return decoding_errors(tokenizer.get_vocabulary()) if is_sentence_piece else None


def _owner(value, method, names):
    """Returns the name of the class that defines a method, or None if it is not one of `names`."""
    owner = next(cls for cls in type(value).__mro__ if method in vars(cls))
    is_known = owner.__module__.partition(".")[0] in ("keras_hub", "keras_recurrent")
    return owner.__name__ if is_known and owner.__name__ in names else None


class IncrementalDetokenizer:
    """Converts the tokens of one sequence to text incrementally.

    The returned chunks, joined, are the text of all tokens. A character whose bytes are several
    tokens is returned when it is complete.

    Args:
        preprocessor: the preprocessor of the model, which detokenizes.
        last_token: integer, the token before the first, whose text was returned before. The text of
            a token may depend on the token before it.
        known: the `TokenBytes` of the preprocessor, with which a token takes 1 % of the time. None:
            each token is converted with those before it.
        shown: `{id: text}` of special tokens whose text is returned.
    """

    def __init__(self, preprocessor, last_token, known=None, shown=None):
        self._preprocessor, self._known, self._shown = preprocessor, known, shown or {}
        self._without_text = set(getattr(preprocessor.tokenizer, "special_token_ids", ()))
        self._tokens = [int(last_token)]
        if (self._text(self._tokens) or REPLACEMENT).endswith(REPLACEMENT):
            self._tokens = []
        self._is_start = not self._tokens
        self._num_context = len(self._tokens)  # tokens that are only context of the others
        self._num_returned = len(self._text(self._tokens))  # characters of the text of `_tokens`
        errors = None if known is None else known.errors
        self._decoder = None if errors is None else DECODER(errors)

    def add(self, token):
        """Returns the text that one more token completes; it may be empty."""
        token = int(token)
        if token in self._without_text:
            return self._shown.get(token, "")
        if self._decoder is None:
            return self._add_text(token)
        data = self._known[token]
        if self._is_start and data.startswith(b" "):  # which a tokenizer may drop
            text = self._text([*self._tokens, token])
            self._tokens = [token]
            data = data if REPLACEMENT in text else text.encode()
        self._is_start = self._is_start and not data
        return self._decoder.decode(data)

    def _add_text(self, token):
        """As `add`, for a tokenizer whose bytes of a token are unknown."""
        self._tokens.append(token)
        text = self._text(self._tokens)
        if text is not None and len(text) > self._num_returned and not text.endswith(REPLACEMENT):
            chunk = text[self._num_returned :]
            self._tokens = self._tokens[self._num_context :]
            self._num_context = len(self._tokens)
            self._num_returned = len(self._text(self._tokens))
            return chunk
        # Later bytes cannot complete a character that began this many tokens ago.
        end = max(self._num_context, len(self._tokens) - LONGEST_CHARACTER + 1)
        certain = self._text(self._tokens[:end], strict=True)
        if not certain or text is None or not text.startswith(certain):
            certain = ""
        chunk = certain[self._num_returned :]
        self._num_returned = max(self._num_returned, len(certain))
        if len(self._tokens) > MAX_TOKENS:
            self._tokens, self._num_context = self._tokens[-2 * LONGEST_CHARACTER :], 0
            self._num_returned = len(self._text(self._tokens[: 1 - LONGEST_CHARACTER]) or "")
        return chunk

    def end(self):
        """Returns the remaining text, which may end in an incomplete character."""
        if self._decoder is not None:
            return self._decoder.decode(b"", final=True)
        return self._text(self._tokens, strict=True)[self._num_returned :]

    def _text(self, tokens, strict=False):
        """Returns the text of tokens; None for invalid bytes that the tokenizer rejects.

        strict: boolean, True raises the tokenizer's error instead.
        """
        try:
            return _detokenize(self._preprocessor, tokens)
        except UnicodeDecodeError:
            if strict:
                raise
            return None


def check_stop_strings(stop, preprocessor):
    """Returns stop strings as a tuple, which is empty for None.

    Raises:
        ValueError: `stop` is not a string or a list of at most 16 strings, one is empty, has more
            than 1,024 characters or is not valid Unicode, or the model has no preprocessor.
    """
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    is_list = isinstance(strings, (list, tuple)) and strings
    if not is_list or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(
            f"`stop` must be a string, or a list of strings, none of them empty; got {stop!r}."
        )
    if len(strings) > MAX_STRINGS or max(map(len, strings)) > MAX_LENGTH:
        raise ValueError(
            f"`stop` must have at most {MAX_STRINGS} strings of at most {MAX_LENGTH} characters; "
            f"got {len(strings)}, the longest of {max(map(len, strings))}. Pass fewer or shorter "
            "ones, or `stop_token_ids`."
        )
    for string in strings:
        check_unicode("stop", string)
    if preprocessor is None:
        raise ValueError(
            "`stop` needs a preprocessor, which converts tokens to text. Without one, pass "
            "`stop_token_ids`."
        )
    return tuple(strings)


class StreamedText:
    """Text of one sequence, which ends before the first stop string.

    Args:
        preprocessor: the preprocessor of the model.
        last_token: integer, the last token of the prompt.
        strings: a tuple of stop strings, which may be empty.
        hidden: token ids without text.
        shown: `{id: text}` of special tokens whose text is kept; other special tokens have none.

    Attributes:
        is_stopped: boolean, True after a stop string.
    """

    def __init__(self, preprocessor, last_token, strings, hidden=(), shown=None):
        known = token_bytes(preprocessor)
        self._detokenizer = IncrementalDetokenizer(preprocessor, last_token, known, shown)
        self._hidden, self._filter = set(hidden), StopFilter(strings)
        self._shown: list[str] = []
        self._num_tokens = self._num_taken = 0
        self.is_stopped = False

    @property
    def shown(self):
        """All text so far."""
        return "".join(self._shown)

    def read(self, token_ids, has_ended):
        """Adds the text of new tokens. `has_ended`: True if these are the last tokens.

        Returns the number of tokens that were read, which may be fewer if the text is stopped.
        """
        last = len(token_ids) if has_ended else 0
        for number, token in enumerate(token_ids, 1):
            self.add(token, number == last)
            if self.is_stopped:
                return number
        return len(token_ids)

    def listen(self, sequence):
        """Reads the new tokens of a `Sequence`, and ends it at a stop string."""
        new, has_ended = sequence.token_ids[self._num_tokens :], sequence.finish_reason is not None
        self._num_tokens += self.read(new, has_ended)
        if self.is_stopped:
            sequence.stop(self._num_tokens)

    def take(self):
        """Returns the text since the last call."""
        first, self._num_taken = self._num_taken, len(self._shown)
        return "".join(self._shown[first:])

    def add(self, token, is_last=False):
        """Returns the text that may be shown after one more token."""
        text = "" if int(token) in self._hidden else self._detokenizer.add(token)
        if is_last:
            text += self._detokenizer.end()
        text, self.is_stopped = self._filter.add(text, is_last)
        self._shown.append(text)
        return text

    def num_cut(self):
        """Returns the number of characters from the stop string on. It may be called only once."""
        return len(self._filter.held + self._detokenizer.end()) if self.is_stopped else 0


class StopFilter:
    """Withholds streamed text that may be part of a stop string.

    Attributes:
        held: string, the text that is withheld; after a stop, the text from the stop string on.
    """

    def __init__(self, strings):
        self._strings, self.held = sorted(strings), ""

    def add(self, text, is_last):
        """Adds text; returns the text that may be shown, and True if a stop string was found."""
        if not self._strings:
            return text, False
        before, text = len(self.held), self.held + text
        starts = [text.find(s, max(0, before + 1 - len(s))) for s in self._strings]
        is_stopped = any(start >= 0 for start in starts)
        if is_stopped:
            start = min(start for start in starts if start >= 0)
        else:
            # Each position is passed once: the time for a token does not grow with the strings.
            start = len(text) if is_last else 0
            while start < len(text) and not self._is_beginning(text[start:]):
                start += 1
        self.held = text[start:]
        return text[:start], is_stopped

    def _is_beginning(self, text):
        """Returns True if a stop string begins with `text`; the strings are sorted."""
        index = bisect.bisect_left(self._strings, text)
        return index < len(self._strings) and self._strings[index].startswith(text)
