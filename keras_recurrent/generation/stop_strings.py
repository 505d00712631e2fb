"""Stop strings: generation ends at the first of them, which is not part of the text."""

import bisect
import contextlib
from typing import Any

import numpy as np

from keras_recurrent.checks.arguments import check_unicode
from keras_recurrent.generation.text import IncrementalDetokenizer, token_bytes

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
    """

    def __init__(self, strings, preprocessor, last_token):
        self.strings, self.num_tokens = strings, 0
        self._texts = [StreamedText(preprocessor, token, strings) for token in last_token]
        self.counts = np.full(len(self._texts), NOT_FOUND, "int32")
        self._num_cut = np.zeros_like(self.counts)

    def add(self, new):
        """Searches more tokens, integers `[B, N]`.

        Returns:
            Boolean `[B]`, True for sequences that have a stop string.
        """
        for row in np.flatnonzero(self.counts == NOT_FOUND):
            text = self._texts[row]
            # A strict tokenizer rejects the tokens, which may follow the end of the sequence.
            with contextlib.suppress(UnicodeDecodeError):
                for count, token in enumerate(new[row].tolist(), self.num_tokens + 1):
                    text.add(token)
                    if text.is_stopped:
                        self.counts[row], self._num_cut[row] = count, len(text.end())
                        break
        self.num_tokens += new.shape[1]
        return self.counts < NOT_FOUND

    def end(self, counts):
        """Returns True for sequences of `counts` tokens that end in a stop string, `[B]`."""
        return counts == self.counts

    def trim(self, texts, counts):
        """Returns texts without the stop strings at the ends of sequences of `counts` tokens."""
        ends = np.where(self.end(counts), self._num_cut, 0)
        return [text[: len(text) - end] for text, end in zip(texts, ends, strict=True)]


class StreamedText:
    """Text of one sequence, which ends before the first stop string.

    Args:
        preprocessor: the preprocessor of the model.
        last_token: integer, the last token of the prompt.
        strings: a tuple of stop strings, which may be empty.
        hidden: token ids that the text does not show.

    Attributes:
        is_stopped: boolean, True after a stop string.
    """

    def __init__(self, preprocessor, last_token, strings, hidden=()):
        known = token_bytes(preprocessor)
        self._detokenizer = IncrementalDetokenizer(preprocessor, last_token, known)
        self._hidden = set(hidden)
        self._filter: Any = StopFilter(strings) if strings else None
        self._shown: list[str] = []
        self.is_stopped = False

    @property
    def shown(self):
        """All text so far."""
        return "".join(self._shown)

    def add(self, token, is_last=False):
        """Returns the text that may be shown after one more token."""
        text = "" if int(token) in self._hidden else self._detokenizer.add(token)
        if is_last:
            text += self._detokenizer.end()
        if self._filter is not None:
            text, self.is_stopped = self._filter.add(text, is_last)
        self._shown.append(text)
        return text

    def end(self):
        """Ends the text at its stop string; returns this string and what follows it."""
        return self._filter.held + self._detokenizer.end()


class StopFilter:
    """Withholds streamed text that may be part of a stop string.

    Args:
        strings: a tuple of strings, which may be empty.

    Attributes:
        held: string, the text that is not shown yet, or from the stop string on.
    """

    def __init__(self, strings):
        self._strings, self.held = sorted(strings), ""

    def add(self, text, is_last):
        """Returns the text that may be shown, and True if a stop string was found.

        Args:
            text: string, the next text.
            is_last: boolean, True if no more text follows.
        """
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
