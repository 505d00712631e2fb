"""Stop strings: generation ends at the first of them, which is not part of the text."""

import bisect

from keras_recurrent.checks.arguments import check_unicode
from keras_recurrent.generation.text import IncrementalDetokenizer, token_bytes

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
