"""Kinds of training samples: strings or tokens, with their checks."""

import numpy as np


class Texts(list):
    """A list of samples in memory: strings, or in subclasses pairs or conversations.

    Its elements need no further check.
    """

    def as_inputs(self):
        """Returns the strings as the preprocessor takes them."""
        return list(self)


def as_texts(x):
    """Converts several strings in memory to `Texts`. Returns anything else unchanged."""
    if isinstance(x, Texts) or getattr(x, "ndim", 1) == 0:
        return x
    texts = x
    if _is_string_tensor(x):
        texts = x.numpy()
    if isinstance(texts, np.ndarray) and texts.dtype.kind in "OUS":
        texts = np.ravel(texts).tolist()
    if not isinstance(texts, (list, tuple)):
        return x
    found = Texts()
    for text in texts:
        if not isinstance(text, (str, bytes)):
            return x
        found.append(text.decode("utf-8") if isinstance(text, bytes) else text)
    return found


def is_tokens(x):
    """Returns True for model inputs, such as a preprocessor returns."""
    return isinstance(x, dict) and "token_ids" in x


def is_text(x):
    """Returns True for several strings, in memory or in a tensor of TensorFlow."""
    if _is_string_tensor(x):
        return True
    return isinstance(as_texts(np.ravel(x) if isinstance(x, np.ndarray) else x), Texts)


def _is_string_tensor(x):
    """Returns True for strings in a tensor of TensorFlow."""
    return getattr(getattr(x, "dtype", None), "name", None) == "string"


def check_samples(name, x, model):
    """Raises an error unless `x` is several strings, tokens, or a possible source of them.

    Args:
        name: string, the argument.
        x: the argument of `fit` or `evaluate`.
        model: the model, whose `preprocessor` may be None.

    Raises:
        ValueError: numbers, a single string (also an element of an unbatched dataset), another
            dictionary, nothing, or text without a preprocessor.
    """
    if is_tokens(x):
        return
    if is_empty(x):
        raise ValueError(f"`{name}` must hold at least one string; got none.")
    if is_text(x):
        if model.preprocessor is None:
            raise no_preprocessor_error(name, model.preprocessor_cls, "train on tokens")
        if getattr(x, "ndim", 1) == 0:
            raise ValueError(
                f"`{name}` must be several strings; got one, without an axis. A dataset of strings "
                "needs `.batch(...)`."
            )
        return
    in_memory = isinstance(x, (str, bytes, dict, list, tuple, int, float))
    if x is None or in_memory or (hasattr(x, "dtype") and hasattr(x, "shape")):
        raise ValueError(
            f"`{name}` must be several strings, or tokens in a dictionary of `token_ids` and "
            "`padding_mask` followed by their labels, or, for a language model, a dictionary of "
            f"`prompts` and `responses` or a list of conversations; got {describe(x)}."
        )


def no_preprocessor_error(name, preprocessor_cls, instead):
    """Returns the error for text without a preprocessor."""
    return ValueError(
        f"`{name}` is text, and the model has no preprocessor to tokenize it. Pass "
        f"`preprocessor=`, such as a `{preprocessor_cls.__name__}`, when you make the model, or "
        f"{instead}."
    )


def describe(x):
    """Returns a short description of a value for error messages."""
    if isinstance(x, dict):
        return f"a dictionary of {sorted(map(str, x))}"
    if isinstance(x, str):
        return "one string"
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype} of shape {x.shape}"
    if isinstance(x, (list, tuple)) and x:
        return f"a {type(x).__name__} with {' and '.join(sorted({type(i).__name__ for i in x}))}"
    return type(x).__name__


def is_empty(x):
    """Returns True for an array, a list or a tuple without elements."""
    return not x.size if isinstance(x, np.ndarray) else isinstance(x, (list, tuple)) and not x
