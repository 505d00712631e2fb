"""Conversion of tokens to bytes and text, at once or one by one, for any tokenizer."""

import codecs
import functools
import re
from typing import Any

import numpy as np

from keras_recurrent.tokenizers.sentence_piece_file import decoding_errors

REPLACEMENT = "\ufffd"  # text of bytes that are an invalid or incomplete character
LONGEST_CHARACTER = 4  # bytes, each one token at most
MAX_TOKENS = 64  # maximum number of tokens that are converted again when one is added
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # of SentencePiece, and of BPE with byte fallback
# Characters that byte-level BPE has for bytes: the printable ones, then others.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_LEVEL = {chr(byte): byte for byte in PRINTABLE}
BYTE_LEVEL |= {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*PRINTABLE}))}
DECODER = codecs.getincrementaldecoder("utf-8")
# Classes whose texts of tokens are known, if no subclass overrides these methods.
DETOKENIZERS = {"BPETokenizer", "ByteTokenizer", "PlainTokenizer", "SentencePieceTokenizer"}
PREPROCESSORS = {"CausalLMPreprocessor", "PlainPreprocessor"}


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
        preprocessor: the preprocessor, which detokenizes.
        tokenizer: its tokenizer.
        without_text: a set of the ids of special tokens, which have no text.
        errors: string, the error handler of the codec that converts the bytes of all tokens to
            their text. None: the text of a token may depend on other tokens, and bytes are unknown.
    """

    def __init__(self, preprocessor):
        super().__init__()
        self.preprocessor, self.tokenizer = preprocessor, preprocessor.tokenizer
        self._core: Any = getattr(self.tokenizer, "_core", None)
        self.without_text = set(getattr(self.tokenizer, "special_token_ids", ()))
        self.errors = _decoding_errors(preprocessor)

    @functools.cached_property
    def _context(self):
        """Id and text of a token, after which no tokenizer drops a space."""
        tokens = ((id, self._text([id])) for id in range(self.tokenizer.vocabulary_size()))
        return next(((id, text) for id, text in tokens if text.isalnum()), (None, ""))

    def _text(self, ids):
        ids = [id for id in ids if id is not None and id not in self.without_text]
        if self.errors is None or not ids:
            return text_of(self.preprocessor, ids)
        return self.tokenizer.detokenize([ids])[0]

    def __missing__(self, token):
        if token in self.without_text:
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
        known: the `TokenBytes` of a preprocessor. If bytes are unknown, each token is converted
            with those before it, which takes 100 times as long.
        last_token: integer, the token before the first, whose text was returned before. The text of
            a token may depend on the token before it.
        shown: `{id: text}` of special tokens whose text is returned.
    """

    def __init__(self, known, last_token, shown=None):
        self._known, self._shown = known, shown or {}
        self._tokens = [int(last_token)]
        if (self._text(self._tokens) or REPLACEMENT).endswith(REPLACEMENT):
            self._tokens = []
        self._is_start = not self._tokens
        self._num_context = len(self._tokens)  # tokens that are only context of the others
        self._num_returned = len(self._text(self._tokens))  # characters of the text of `_tokens`
        self._decoder = None if known.errors is None else DECODER(known.errors)

    def add(self, token):
        """Returns the text that one more token completes; it may be empty."""
        token = int(token)
        if token in self._known.without_text:
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
            return _detokenize(self._known.preprocessor, tokens)
        except UnicodeDecodeError:
            if strict:
                raise
            return None
