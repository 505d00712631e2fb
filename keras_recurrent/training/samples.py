"""What language models are given: text, or tokens, or a dataset of them."""

import numpy as np


def is_tokens(x):
    """Whether these are the inputs of a model, as its preprocessor makes them."""
    return isinstance(x, dict) and "token_ids" in x


def is_strings(x):
    """Whether these are strings in memory, in a list, a tuple or an array."""
    return isinstance(x, (list, tuple, np.ndarray)) and is_text(x)


def is_text(x):
    """Whether these are several strings, in memory or in a tensor of TensorFlow."""
    if isinstance(x, (str, bytes)):
        return False
    dtype = getattr(x, "dtype", None)
    if isinstance(dtype, np.dtype):
        if dtype.kind != "O":
            return dtype.kind in "US"
        x = np.ravel(x).tolist()
    elif dtype is not None:
        return getattr(dtype, "name", None) == "string"
    return isinstance(x, (list, tuple)) and all(isinstance(text, (str, bytes)) for text in x)


def check_samples(name, x, preprocessor_cls, has_preprocessor):
    """Raises for what is neither several strings nor tokens, nor anything that may yield them.

    Args:
        name: string, the argument.
        x: what `fit` or `evaluate` got.
        preprocessor_cls: the class of the model's preprocessor.
        has_preprocessor: boolean, whether the model has one.

    Raises:
        ValueError: numbers, one string (also as what an unbatched dataset yields), another
            dictionary, nothing, or text without a preprocessor.
    """
    if is_tokens(x):
        return
    if _is_empty(x):
        raise ValueError(f"`{name}` holds nothing to train on; got no strings at all.")
    if is_text(x):
        if not has_preprocessor:
            raise _no_preprocessor(name, preprocessor_cls, "train on tokens")
        if getattr(x, "ndim", 1) == 0:
            raise ValueError(
                f"`{name}` must be several strings; got one, of no axis. A dataset of strings "
                "needs `.batch(...)`."
            )
        return
    in_memory = isinstance(x, (str, bytes, dict, list, tuple, int, float))
    if x is None or in_memory or (hasattr(x, "dtype") and hasattr(x, "shape")):
        raise ValueError(
            f"`{name}` must be several strings, or tokens in a dictionary of `token_ids` and "
            f"`padding_mask` with their labels beside it; got {described(x)}."
        )


def check_no_text(inputs, preprocessor_cls):
    """Raises for prompts that are text, where a model has no preprocessor.

    Raises:
        ValueError: names `inputs`, an argument of `generate`.
    """
    if not _is_empty(inputs) and (isinstance(inputs, (str, bytes)) or is_text(inputs)):
        instead = "pass a dictionary of `token_ids` and `padding_mask`, each [batch, time]"
        raise _no_preprocessor("inputs", preprocessor_cls, instead)


def _no_preprocessor(name, preprocessor_cls, instead):
    """The error where text comes, and nothing makes tokens of it."""
    return ValueError(
        f"`{name}` is text, and the model has no preprocessor to make tokens of it. Pass a "
        f"`preprocessor=` where you make the model, such as a `{preprocessor_cls.__name__}`, or "
        f"{instead}."
    )


def check_prompts(inputs):
    """Raises for prompts that are neither one string nor several.

    Raises:
        ValueError: names `inputs`, an argument of `generate`.
    """
    if _is_empty(inputs):
        raise ValueError("`inputs` must hold at least one prompt; got none.")
    if not isinstance(inputs, str) and not is_text(inputs):
        raise ValueError(
            "`inputs` must be a string or several of them where the model has a preprocessor; got "
            f"{described(inputs)}. Tokens go into a model with `preprocessor=None`, bytes through "
            "`bytes.decode`."
        )


def described(x):
    """What a value is, in few words."""
    if isinstance(x, dict):
        return f"a dictionary of {sorted(map(str, x))}"
    if isinstance(x, str):
        return "one string"
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype} of shape {x.shape}"
    if isinstance(x, (list, tuple)) and x:
        return f"a {type(x).__name__} with {' and '.join(sorted({type(i).__name__ for i in x}))}"
    return type(x).__name__


def _is_empty(x):
    return not x.size if isinstance(x, np.ndarray) else isinstance(x, (list, tuple)) and not x
