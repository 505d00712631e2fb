"""Checks of an operation's tensors: dtypes, and shapes written as dimensions such as "B T 2D"."""

from typing import Any, NamedTuple

from keras.backend import standardize_dtype

from keras_recurrent.checks.dtypes import accepted_dtypes, dtype_error
from keras_recurrent.checks.shapes import check_rank_known, fits


class Dimensions(NamedTuple):
    """The dimensions of a tensor, parsed; see `keras_recurrent.backends.signatures`.

    Attributes:
        names: the dimensions as written, such as "2D".
        has_leading: boolean, whether the dimensions begin with "...".
        terms: `(name, letter, factor, offset)` of each other dimension, whose size is `factor`
            times the size of the letter, plus `offset`. The letter of a number is None.
    """

    names: tuple
    has_leading: bool
    terms: tuple


class Argument(NamedTuple):
    """A tensor of an operation: its name in errors, its dimensions and the dtypes it may have."""

    name: str
    dimensions: Dimensions
    dtypes: frozenset
    dtypes_in_words: str


def parse(dimensions):
    """Returns the `Dimensions` of a string such as "... 2D"."""
    names = tuple(dimensions.split())
    has_leading = names[:1] == ("...",)
    return Dimensions(names, has_leading, tuple(map(_term, names[has_leading:])))


def _term(name):
    if name.isdigit():
        return name, None, 0, int(name)
    letter = next(c for c in name if c.isalpha())
    factor, offset = name.split(letter)
    return name, letter, int(factor or 1), int(offset or 0)


def argument(name, dimensions):
    """Returns the `Argument` of a tensor with dimensions such as "B T D"."""
    return Argument(name, parse(dimensions), *accepted_dtypes(name))


def shape_of(dimensions, sizes):
    """Returns the shape of dimensions such as "... 2D W-1", with None for unknown sizes."""
    _, has_leading, terms = parse(dimensions)
    shape = tuple(
        offset if letter is None else None if size is None else factor * size + offset
        for _, letter, factor, offset in terms
        for size in [sizes.get(letter)]
    )
    return (*sizes["..."], *shape) if has_leading else shape


def check_tensors(operation, tensors, arguments, required=()):
    """Checks dtypes and shapes, each tensor once.

    Args:
        operation: string, for errors.
        tensors: `{name: tensor or None}`.
        arguments: `{name: Argument}`.
        required: names of tensors that must not be None.

    Returns:
        `{letter: size}`, with None for unknown sizes, and a tuple for "...".

    Raises:
        ValueError: names the argument.
    """
    given = []
    for name, tensor in tensors.items():
        if tensor is None:
            if name in required:
                raise ValueError(f"`{operation}` needs the argument `{name}`; got None.")
            continue
        argument = arguments[name]
        shape: Any = getattr(tensor, "shape", None)
        if shape is None or getattr(shape, "rank", 0) is None:
            check_rank_known(operation, argument.name, tensor)  # raises
        dtype = standardize_dtype(tensor.dtype)
        if dtype not in argument.dtypes:
            raise dtype_error(operation, argument.name, argument.dtypes_in_words, dtype)
        given.append((argument, tuple(shape)))
    # The loops are inline, because they take most of the time of a check.
    sizes = {}
    for argument, shape in given:
        _, has_leading, terms = argument.dimensions
        leading = len(shape) - len(terms)
        if leading and not (has_leading and leading > 0):
            raise _rank_error(operation, argument, shape)
        if has_leading and sizes.get("...") is None:
            sizes["..."] = shape[:leading]
        for (name, letter, _, _), size in zip(terms, shape[leading:], strict=True):
            if name == letter and sizes.get(letter) is None:
                sizes[letter] = size
    for argument, shape in given:
        _, has_leading, terms = argument.dimensions
        leading = len(shape) - len(terms)
        if has_leading and not fits(shape[:leading], sizes["..."]):
            raise _size_error(operation, argument, shape, sizes, "...", sizes["..."])
        for (name, letter, factor, offset), size in zip(terms, shape[leading:], strict=True):
            expected = offset if letter is None else sizes.get(letter)
            if expected is None or size is None:
                continue
            if letter is not None:
                expected = factor * expected + offset
            if expected != size:
                raise _size_error(operation, argument, shape, sizes, name, expected, size)
    return sizes


def _rank_error(operation, argument, shape):
    names, has_leading, terms = argument.dimensions
    wanted = f"at least {len(terms)}" if has_leading else f"{len(terms)}"
    wanted += " dimension" if len(terms) == 1 else " dimensions"
    return ValueError(
        f"`{operation}`: `{argument.name}` must have {wanted}, [{', '.join(names)}]; got the shape "
        f"{shape}."
    )


def _size_error(operation, argument, shape, sizes, name, expected, size=None):
    names, _, terms = argument.dimensions
    size = shape[: len(shape) - len(terms)] if size is None else size
    known = ", ".join(f"{letter} = {n}" for letter, n in sizes.items() if n is not None)
    wanted = "" if name.isdigit() else f": {name} should be {expected}, not {size}"
    return ValueError(
        f"`{operation}`: `{argument.name}` must have the shape [{', '.join(names)}], with {known}; "
        f"got the shape {shape}{wanted}."
    )
