"""Functions shared by the tokenizers that are a file of a checkpoint."""

import contextlib
import re

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


def tokenize_around(tokenizer, text, special_tokens):
    """Tokenizes the text between special tokens, and special tokens to their ids.

    Args:
        tokenizer: a tokenizer that tokenizes special tokens as plain text.
        text: a string, or a list of strings.
        special_tokens: `{token: id}`.

    Returns:
        A list of ids, or a list of lists.
    """
    if not isinstance(text, str):
        return [tokenize_around(tokenizer, t, special_tokens) for t in text]
    # Where one token begins another, the longer one matches.
    longest_first = sorted(special_tokens, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    ids = []
    for part in filter(None, parts):
        found = special_tokens.get(part)
        ids += tokenizer.tokenize([part])[0] if found is None else [found]
    return ids
