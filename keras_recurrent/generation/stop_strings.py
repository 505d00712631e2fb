"""Stop strings: generation ends at the first of them, which is not part of the text."""

import bisect

import numpy as np

from keras_recurrent.checks.arguments import check_unicode
from keras_recurrent.generation.text import LONGEST_CHARACTER, REPLACEMENT, texts_of

NOT_FOUND = np.iinfo("int32").max
MAX_STRINGS, MAX_LENGTH = 16, 1024  # of stop strings, and of each in characters


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


class StopStrings:
    """Searches the generated tokens of several sequences for stop strings.

    Args:
        strings: a tuple of strings.
        preprocessor: the preprocessor of the model, which detokenizes.
        last_token: integers `[B]`, the last token of each prompt.

    Attributes:
        strings: the argument.
        num_tokens: integer, number of tokens searched so far.
        counts: int32 `[B]`, number of tokens up to the one that completes a stop string.
            `NOT_FOUND` for sequences without one.
        cut: int32 `[B]`, number of characters from the beginning of the stop string to the end of
            the text of these tokens.
    """

    def __init__(self, strings, preprocessor, last_token):
        self.strings, self._preprocessor = strings, preprocessor
        self._tokens = np.reshape(last_token, (-1, 1))
        self.counts = np.full(len(self._tokens), NOT_FOUND, "int32")
        self.cut = np.zeros_like(self.counts)
        longest = max(len(s.encode()) for s in strings)
        self._overlap = longest + LONGEST_CHARACTER

    @property
    def num_tokens(self):
        return self._tokens.shape[1] - 1

    def add(self, new):
        """Searches more tokens, integers `[B, N]`.

        Returns:
            Boolean `[B]`, True for sequences that have a stop string.
        """
        before = self.num_tokens
        self._tokens = np.concatenate((self._tokens, new), axis=1)
        # The first token is context: the text of a token may depend on the one before.
        first = max(0, before - self._overlap)
        windows = self._tokens[:, first:]
        searched = np.flatnonzero(self.counts == NOT_FOUND)
        texts = self._texts(windows[searched])
        for row, text in zip(searched, texts, strict=True):
            if self._find(text) >= 0:
                self._locate(row, windows[row], before - first)
        return self.counts < NOT_FOUND

    def end(self, counts):
        """Returns True for sequences of `counts` tokens that end in a stop string, `[B]`."""
        return counts == self.counts

    def trim(self, texts, counts):
        """Returns texts without the stop strings at the ends of sequences of `counts` tokens."""
        ends = np.where(self.end(counts), self.cut, 0)
        return [text[: len(text) - end] for text, end in zip(texts, ends, strict=True)]

    def _locate(self, row, window, num_known):
        """Stores the first token that completes a stop string, after `num_known` known ones."""
        for end in range(num_known + 2, len(window) + 1):
            (text,) = self._texts(window[None, :end])
            start = self._find(text)
            if start >= 0:
                self.counts[row] = self.num_tokens - (len(window) - end)
                self.cut[row] = len(text) - start
                return

    def _find(self, text):
        """Returns the position of the first stop string, -1 if there is none."""
        positions = [text.find(s) for s in self.strings]
        return min((p for p in positions if p >= 0), default=-1)

    def _texts(self, windows):
        """Returns the text of each window after its first token."""
        contexts = texts_of(self._preprocessor, windows[:, :1])
        texts = texts_of(self._preprocessor, windows)
        for row, context in enumerate(contexts):
            if context and not context.endswith(REPLACEMENT):
                texts[row] = texts[row][len(context) :]
            else:
                (texts[row],) = texts_of(self._preprocessor, windows[row, None, 1:])
        return texts


class StopFilter:
    """Withholds streamed text that may be part of a stop string.

    Args:
        strings: a tuple of strings, which may be empty.
    """

    def __init__(self, strings):
        self._strings, self._held = sorted(strings), ""

    def add(self, text, is_last):
        """Returns the text that may be shown, and True if a stop string was found.

        Args:
            text: string, the next text.
            is_last: boolean, True if no more text follows.
        """
        before, text = len(self._held), self._held + text
        starts = [text.find(s, max(0, before + 1 - len(s))) for s in self._strings]
        if starts := [start for start in starts if start >= 0]:
            return text[: min(starts)], True
        # Each position is passed once, so that the time for a token does not grow with the strings.
        start = len(text) if is_last else 0
        while start < len(text) and not self._is_beginning(text[start:]):
            start += 1
        self._held = text[start:]
        return text[:start], False

    def _is_beginning(self, text):
        """Returns True if a stop string begins with `text`; the strings are sorted."""
        index = bisect.bisect_left(self._strings, text)
        return index < len(self._strings) and self._strings[index].startswith(text)
