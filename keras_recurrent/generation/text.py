"""Tokens of prompts, the text of new tokens, and stop strings, which end the text."""

import bisect

import numpy as np

from keras_recurrent.chat.templates import ChatPrompt
from keras_recurrent.checks.arguments import check_unicode
from keras_recurrent.checks.token_ids import check_token_ids
from keras_recurrent.tokenizers.checkpoint_files import tokenize_parts
from keras_recurrent.tokenizers.detokenizer import IncrementalDetokenizer, token_bytes
from keras_recurrent.training.samples import as_texts, describe, is_empty, is_text

MAX_STRINGS, MAX_LENGTH = 16, 1024  # of stop strings, and of each in characters


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


def tokenize_prompt(tokenizer, prompt):
    """Returns the token ids of a `ChatPrompt`, a list."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    return tokenize_parts(tokenizer, prompt.parts)[0]


def tokenize_prompts(tokenizer, texts, add_start_token):
    """Returns a list of token ids for each text.

    Args:
        tokenizer: the tokenizer.
        texts: a list of strings, some of which may be a `ChatPrompt`.
        add_start_token: boolean, begins texts with the start token, if there is one. A `ChatPrompt`
            that begins with it gets no second one.
    """
    has_start = add_start_token and tokenizer.start_token_id is not None
    start = [tokenizer.start_token_id] if has_start else []
    plain = [text for text in texts if not isinstance(text, ChatPrompt)]
    tokens = iter(tokenizer(plain) if plain else ())
    rows = []
    for text in texts:
        if isinstance(text, ChatPrompt):
            ids = tokenize_prompt(tokenizer, text)
            rows.append(ids if ids[:1] == start else [*start, *ids])
        else:
            rows.append([*start, *np.asarray(next(tokens)).tolist()])
    return rows


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


# --- Stop strings ---


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
        self._detokenizer = IncrementalDetokenizer(token_bytes(preprocessor), last_token, shown)
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
