"""Conversion of tokens to text, one token at a time."""

import contextlib
import functools

import keras_hub
import numpy as np

from keras_recurrent.tokenizers import BPETokenizer

REPLACEMENT = "\ufffd"  # text of bytes that are an invalid or incomplete character
LONGEST_CHARACTER = 4  # bytes, each one token at most
SPACE = "\u2581"  # in the tokens of SentencePiece


def hidden_stop_tokens(preprocessor):
    """Returns the ids of the tokens that end an answer, a tuple, which its text does not show."""
    return tuple(getattr(preprocessor, "stop_token_ids", ()))


def texts_of(preprocessor, rows):
    """Returns the texts of tokens `[B, T]`, with U+FFFD for invalid bytes at their ends."""
    rows = np.asarray(rows, "int32")
    if not rows.size:
        return [""] * len(rows)
    try:
        return _detokenize(preprocessor, rows)
    except UnicodeDecodeError:  # of a tokenizer that is strict
        if len(rows) > 1:
            return [texts_of(preprocessor, row[None])[0] for row in rows]
        return [_text_of_whole_characters(preprocessor, rows)]


def _detokenize(preprocessor, rows):
    """Returns the texts of tokens `[B, T]`, at least one of each; may raise UnicodeDecodeError."""
    batch = {"token_ids": rows, "padding_mask": np.ones_like(rows, dtype=bool)}
    texts = preprocessor.generate_postprocess(batch)
    return [t if isinstance(t, str) else bytes(t).decode("utf-8", "replace") for t in texts]


def _text_of_whole_characters(preprocessor, row):
    """Returns the text of tokens `[1, T]` without incomplete characters at both ends."""
    ends = [(i, j) for i in range(LONGEST_CHARACTER) for j in range(LONGEST_CHARACTER)]
    for first, last in sorted(ends, key=sum):
        part = row[:, first : row.shape[1] - last]
        with contextlib.suppress(UnicodeDecodeError):
            text = _detokenize(preprocessor, part)[0] if part.size else ""
            return REPLACEMENT * (first > 0) + text + REPLACEMENT * (last > 0)
    return REPLACEMENT


class TokenTexts(dict):
    """Texts of tokens, which the detokenizers of a preprocessor share: `{token: (text, length)}`.

    `text` is that of the token after another one, and `length` the number of characters of the
    token alone. Detokenizing takes 100 times as long as a look-up.

    Args:
        preprocessor: the preprocessor of the model.
    """

    def __init__(self, preprocessor):
        super().__init__()
        self._preprocessor = preprocessor

    @functools.cached_property
    def is_known(self):
        """True if a token that is whole characters adds the same text after any other one."""
        hub, tokenizer = keras_hub.tokenizers, self._preprocessor.tokenizer
        detokenize = type(tokenizer).detokenize
        postprocess = keras_hub.models.CausalLMPreprocessor.generate_postprocess
        if type(self._preprocessor).generate_postprocess is not postprocess:
            return False
        if detokenize is BPETokenizer.detokenize:
            return tokenizer.joins_texts_of_tokens
        if detokenize is hub.SentencePieceTokenizer.detokenize:
            # The space after a word may be part of its token, and is dropped at the end.
            tokens = filter(None, tokenizer.get_vocabulary())
            return not any(t.endswith(SPACE) and t.strip(SPACE) for t in tokens)
        return detokenize is hub.ByteTokenizer.detokenize


class IncrementalDetokenizer:
    """Converts the tokens of one sequence to text incrementally.

    The returned chunks, joined, are the text of all tokens. A character whose bytes are several
    tokens is returned when it is complete.

    Args:
        preprocessor: the preprocessor of the model, which detokenizes.
        last_token: integer, the token before the first, whose text was returned before. The text of
            a token may depend on the token before it.
        known: the `TokenTexts`, which this object uses and fills, or None.
    """

    def __init__(self, preprocessor, last_token, known=None):
        self._preprocessor = preprocessor
        self._known = {} if known is None else known
        self._learns = known is not None and known.is_known
        self._without_text = set(getattr(preprocessor.tokenizer, "special_token_ids", ()))
        self._tokens = [int(last_token)]
        if (self._text(self._tokens) or REPLACEMENT).endswith(REPLACEMENT):
            self._tokens = []
        self._num_context = len(self._tokens)  # tokens that are only context of the others
        self._num_returned = len(self._text(self._tokens))  # characters of the text of `_tokens`

    def add(self, token):
        """Returns the text that one more token completes; it may be empty."""
        token = int(token)
        if token in self._without_text:
            return ""
        if token in self._known and 0 < len(self._tokens) == self._num_context:
            chunk, self._num_returned = self._known[token]
            self._tokens, self._num_context = [token], 1
            return chunk
        self._tokens.append(token)
        text = self._text(self._tokens)
        if text is not None and len(text) > self._num_returned and not text.endswith(REPLACEMENT):
            context, chunk = text[: self._num_returned], text[self._num_returned :]
            self._tokens = self._tokens[self._num_context :]
            self._num_context = len(self._tokens)
            self._num_returned = len(self._text(self._tokens))
            # After spaces, a tokenizer may drop the spaces of the next token.
            is_alone = self._tokens == [token] and context and not context[-1].isspace()
            if is_alone and self._learns and REPLACEMENT not in context + chunk:
                self._known[token] = chunk, self._num_returned
            return chunk
        # Later bytes cannot complete a character that began this many tokens ago.
        certain = self._text(self._tokens[: 1 - LONGEST_CHARACTER])
        if not certain or text is None or not text.startswith(certain):
            return ""
        chunk = certain[self._num_returned :]
        self._num_returned = max(self._num_returned, len(certain))
        return chunk

    def end(self):
        """Returns the remaining text, which may end in an incomplete character."""
        return self._text(self._tokens, strict=True)[self._num_returned :]

    def _text(self, tokens, strict=False):
        """Returns the text of tokens; None for invalid bytes that the tokenizer rejects.

        strict: boolean, True raises the tokenizer's error instead.
        """
        if not tokens:
            return ""
        try:
            return _detokenize(self._preprocessor, np.array([tokens], "int32"))[0]
        except UnicodeDecodeError:
            if strict:
                raise
            return None
