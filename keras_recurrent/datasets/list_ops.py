"""ListOps: nested operations on lists of digits, and what they come to."""

import random

import numpy as np

from keras_recurrent.checks.arguments import check_positive_integer

DIGITS = 10
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
# The number of a token is its place here; 0 is padding.
TOKENS = ("", *map(str, range(DIGITS)), *OPERATORS, "]")
FIRST_DIGIT, FIRST_OPERATOR, END = 1, 1 + DIGITS, 1 + DIGITS + len(OPERATORS)
NESTED = 0.25  # the part of arguments that are lists themselves
TRIES = 1_000_000  # for an example, until none of the wanted length is to be hoped for


def list_ops(num_examples, min_length=500, max_length=2000, max_depth=10, max_args=10, seed=0):
    """Examples of ListOps, ready for `fit`.

    ```
    [MAX 4 3 [MIN 2 3 ] 1 0 ]      is 4
    ```

    Nangia & Bowman 2018 (arXiv:1804.06028), in the form of Long Range Arena (Tay et al. 2020,
    arXiv:2011.04006, section 2.2.1), whose lengths, depths and numbers of arguments are the
    defaults, and whose split has 96,000 examples to train on and 2,000 each to validate and test
    with. The value of a row is one of ten classes. To find it, a model must read the whole row and
    keep to the brackets: what stands deep inside comes out at the end of a list that began long
    before.

    A list has an operator and 2 to `max_args` arguments, any number of them alike. An argument is a
    list with a probability of 1/4, and a digit otherwise; at `max_depth` it is a digit. MIN and MAX
    are the least and the greatest of the arguments, MED is their median, rounded down where it lies
    between two, and SM their sum modulo 10. Rows are drawn one by one until they are as long as
    asked for, independently of each other.

    | token | `0` to `9` | `[MIN` | `[MAX` | `[MED` | `[SM` | `]` | padding, behind |
    | --- | --- | --- | --- | --- | --- | --- | --- |
    | number | 1 to 10 | 11 | 12 | 13 | 14 | 15 | 0 |

    Args:
        num_examples: integer, rows.
        min_length: integer, the fewest tokens of a row.
        max_length: integer, the most tokens of a row; shorter rows are padded to it.
        max_depth: integer, how deep a row is nested at most, its digits included: 1 is a digit
            alone, 2 a list of digits.
        max_args: integer, the most arguments of a list, at least 2.
        seed: integer, of a generator of its own: the same examples for the same arguments.

    Returns:
        `(tokens, labels)`: int32 `[num_examples, max_length]` and int32 `[num_examples]`, 0 to 9:
        the `x` and `y` of `fit`. A vocabulary of 16 has all tokens.

    Raises:
        ValueError: a number that is no integer from 1 on; a `max_args` below 2; a `min_length`
            above `max_length` or above what `max_depth` and `max_args` allow; or lengths that next
            to no row has.

    Example:

    >>> from keras_recurrent.datasets import list_ops
    >>> tokens, labels = list_ops(2, min_length=5, max_length=8, max_depth=3, seed=2)
    >>> names = ["", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"]
    >>> for row, label in zip(tokens, labels):
    ...     print(" ".join(names[token] for token in row if token), "is", label)
    [MED 4 3 9 6 ] is 5
    [MED 0 0 7 9 0 ] is 0
    """
    _check(num_examples, min_length, max_length, max_depth, max_args)
    rng = random.Random(seed)
    tokens = np.zeros((num_examples, max_length), "int32")
    labels = np.zeros(num_examples, "int32")
    for i in range(num_examples):
        row, labels[i] = _row(rng, min_length, max_length, max_depth, max_args)
        tokens[i, : len(row)] = row
    return tokens, labels


def _row(rng, min_length, max_length, max_depth, max_args):
    """The tokens of one row, and its value."""
    for _ in range(TRIES):
        row = []
        value = _draw(rng, row, max_length, max_depth, max_args)
        if value is not None and len(row) >= min_length:
            return row, value
    raise ValueError(
        f"`min_length` and `max_length`: no row of {min_length} to {max_length} tokens came up in "
        f"{TRIES:,} draws with `max_depth={max_depth}` and `max_args={max_args}`. Ask for less "
        "narrow lengths, or for others."
    )


def _draw(rng, row, room, depth, max_args):
    """Puts a digit or a list behind `row`, and returns its value; None: there is no room."""
    if depth == 1 or rng.random() >= NESTED:
        digit = rng.randrange(DIGITS)
        row.append(FIRST_DIGIT + digit)
        return digit if len(row) <= room else None
    operator = rng.randrange(len(OPERATORS))
    row.append(FIRST_OPERATOR + operator)
    values = []
    for _ in range(rng.randint(2, max_args)):
        value = _draw(rng, row, room, depth - 1, max_args)
        if value is None:
            return None
        values.append(value)
    row.append(END)
    return _apply(OPERATORS[operator], values) if len(row) <= room else None


def _apply(operator, values):
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % DIGITS
    values, half = sorted(values), len(values) // 2
    return (values[half] + values[-1 - half]) // 2


def _check(num_examples, min_length, max_length, max_depth, max_args):
    for name, number in (
        ("num_examples", num_examples),
        ("min_length", min_length),
        ("max_length", max_length),
        ("max_depth", max_depth),
        ("max_args", max_args),
    ):
        check_positive_integer(name, number)
    if max_args < 2:
        raise ValueError(f"`max_args` must be at least 2, which every list has; got {max_args}.")
    if min_length > max_length:
        raise ValueError(
            f"`min_length` must be at most `max_length`, {max_length}; got {min_length}."
        )
    longest = 1
    for _ in range(max_depth - 1):
        longest = 2 + max_args * longest
        if longest >= min_length:
            return
    if longest < min_length:
        raise ValueError(
            f"`min_length` must be at most {longest}, the longest row with `max_depth={max_depth}` "
            f"and `max_args={max_args}`; got {min_length}."
        )
