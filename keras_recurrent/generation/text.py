"""Text from tokens that come one by one."""

import numpy as np

CUT = "\ufffd"  # what stands for bytes that are no character, or not yet one
LONGEST_CHARACTER = 4  # bytes, each a token at most


class TextPieces:
    """The text of one row, in pieces that together are what all its tokens mean.

    A character whose bytes are several tokens is held back until it is whole.

    Args:
        preprocessor: the model's, which makes text of tokens.
        last_token: integer, the token before the first, whose text is out already: a word may have
            another text behind it than alone.
    """

    def __init__(self, preprocessor, last_token):
        self._preprocessor = preprocessor
        self._tokens = [int(last_token)]
        if (self._text(self._tokens) or CUT).endswith(CUT):
            self._tokens = []
        self._out = len(self._text(self._tokens))  # how much of the text of these is out

    def add(self, token):
        """The text that one more token makes certain; it may be empty."""
        self._tokens.append(int(token))
        text = self._text(self._tokens)
        if text is not None and len(text) > self._out and not text.endswith(CUT):
            piece = text[self._out :]
            self._tokens = self._tokens[-1:]
            self._out = len(self._text(self._tokens) or "")
            return piece
        # What is older than a character is long cannot become one any more.
        certain = self._text(self._tokens[: 1 - LONGEST_CHARACTER])
        if not certain or text is None or not text.startswith(certain):
            return ""
        piece, self._out = certain[self._out :], max(self._out, len(certain))
        return piece

    def end(self):
        """The text that was held back, as it stands."""
        return self._text(self._tokens, strict=True)[self._out :]

    def _text(self, tokens, strict=False):
        """None where the tokenizer refuses bytes that are no character, unless it may."""
        rows = {"token_ids": np.array([tokens], "int32")}
        rows["padding_mask"] = np.ones_like(rows["token_ids"], dtype=bool)
        try:
            (text,) = self._preprocessor.generate_postprocess(rows) if tokens else ("",)
        except UnicodeDecodeError:
            if strict:
                raise
            return None
        return text if isinstance(text, str) else bytes(text).decode("utf-8", "replace")
