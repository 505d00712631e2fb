"""Checks of numbers, booleans and tensors."""

import math
import numbers

import numpy as np


def is_finite_number(value):
    """Returns True if a value is a finite number, not a boolean."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # `torch.compile` does not support `math.isfinite`.
    return real and -math.inf < value < math.inf


def is_integer(value):
    """Returns True if a value is an integer of Python or NumPy, not a boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_positive_integer(name, value, or_none=False):
    if or_none and value is None:
        return
    # NumPy integers are accepted: many NumPy functions return sizes.
    if not is_integer(value) or value < 1:
        raise ValueError(f"`{name}` must be an integer, at least 1; got {value!r}.")


def check_positive_integers(**values):
    """Raises an error unless all values are integers of at least 1."""
    for name, value in values.items():
        check_positive_integer(name, value)


def check_boolean(name, value):
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be True or False; got {value!r}.")


def check_booleans(**values):
    """Raises an error unless all values are booleans."""
    for name, value in values.items():
        check_boolean(name, value)


def check_unicode(name, text):
    """Raises an error if a string has surrogates, which UTF-8 cannot represent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"`{name}` must be valid Unicode; got the surrogate {text[error.start]!r} at position "
            f"{error.start}. `text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')` "
            "joins pairs of surrogates, and replaces others."
        ) from error


def check_number(name, value, above=None, or_none=False):
    """Raises an error unless `value` is a finite number above `above`, or at least 0 if None.

    With `or_none`, `value` may also be None.
    """
    if or_none and value is None:
        return
    wanted = "at least 0" if above is None else f"above {above}"
    if not is_finite_number(value) or not (value >= 0 if above is None else value > above):
        raise ValueError(f"`{name}` must be a finite number {wanted}; got {value!r}.")


def check_factors(**values):
    """Raises an error unless all values are finite numbers above 0, or None."""
    for name, value in values.items():
        check_number(name, value, above=0, or_none=True)


def check_width_known(layer, input_shape):
    if input_shape[-1] is None:
        raise ValueError(
            f"`{type(layer).__name__}` needs inputs whose last dimension, the width, is known; got "
            f"the shape {tuple(input_shape)}. Set it, as in `keras.Input((None, 64))`."
        )


def check_num_blocks(num_blocks, width):
    check_divides("num_blocks", num_blocks, "the width of the gates", width)


def check_divides(name, number, what, width):
    if width % number:
        fitting = [n for n in range(1, width + 1) if width % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - number))
        mend = f"The nearest divisor is {nearest}."
        if what.startswith("`"):  # another argument
            mend += " A preset has a value of its own: pass both."
        elif number > width:  # probably meant as a width
            mend = f"`{name}` does not set the width of the output: leave it out for the default."
        raise ValueError(f"`{name}` must divide {what}, {width}; got {number}. {mend}")


def check_tensor(name, value):
    if not hasattr(value, "shape"):
        raise ValueError(
            f"`{name}` must be a tensor or an array; got a {type(value).__name__}. "
            "`numpy.asarray` converts lists."
        )
