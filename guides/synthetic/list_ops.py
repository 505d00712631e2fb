"""ListOps: nested operations on lists of digits, with their values as labels."""

import random

import numpy as np

from keras_recurrent.checks.arguments import check_positive_integers

DIGITS = 10
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
# The index is the token id; 0 is padding.
TOKENS = ("", *map(str, range(DIGITS)), *OPERATORS, "]")
FIRST_DIGIT, FIRST_OPERATOR, END = 1, 1 + DIGITS, 1 + DIGITS + len(OPERATORS)
LIST_PROBABILITY = 0.25  # of an argument being a list
MAX_DRAWS = 1_000_000  # draws of one example before an error about its length


def list_ops(num_examples, *, min_length=500, max_length=2000, max_depth=10, max_args=10, seed=0):
    """Generates examples of ListOps, ready for `fit`.

    ```
    [MAX 4 3 [MIN 2 3 ] 1 0 ]      is 4
    ```

    Nangia & Bowman 2018 (arXiv:1804.06028), in the form of Long Range Arena (Tay et al. 2020,
    arXiv:2011.04006, section 2.2.1), whose lengths, depths and numbers of arguments are the
    defaults. Its split has 96,000 training, 2,000 validation and 2,000 test examples. The value of
    a sequence is one of ten classes. To compute it, a model must process the whole sequence and
    match the brackets: the value of an inner list is needed at the end of a list that began long
    before it.

    A list has an operator and 2 to `max_args` arguments, with every number equally probable. An
    argument is a list with a probability of 1/4, and a digit otherwise; at `max_depth` it is a
    digit. MIN and MAX are the smallest and the largest argument, MED is the median, rounded down
    between two integers, and SM the sum modulo 10. Sequences are drawn independently, and those of
    other lengths are discarded.

    | token | `0` to `9` | `[MIN` | `[MAX` | `[MED` | `[SM` | `]` | padding, at the end |
    | --- | --- | --- | --- | --- | --- | --- | --- |
    | id | 1 to 10 | 11 | 12 | 13 | 14 | 15 | 0 |

    Args:
        num_examples: integer, number of sequences.
        min_length: integer, minimum number of tokens of a sequence.
        max_length: integer, maximum number of tokens of a sequence; shorter ones are padded.
        max_depth: integer, maximum depth of nesting, including the digits: 1 is a single digit, 2 a
            list of digits.
        max_args: integer, maximum number of arguments of a list, at least 2.
        seed: integer, seed of a separate generator. Equal arguments give equal examples.

    Returns:
        `(tokens, labels)`: int32 `[num_examples, max_length]` and int32 `[num_examples]`, 0 to 9.
        They are the `x` and `y` of `fit`. A vocabulary of 16 has all tokens.

    Raises:
        ValueError: a number is not an integer of at least 1; `max_args` is below 2; `min_length` is
            above `max_length` or above the longest sequence with `max_depth` and `max_args`; or
            sequences of these lengths are too rare.

    Example:

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
        row, labels[i] = _draw_sequence(rng, min_length, max_length, max_depth, max_args)
        tokens[i, : len(row)] = row
    return tokens, labels


def _draw_sequence(rng, min_length, max_length, max_depth, max_args):
    """Draws the tokens of one sequence; returns them and their value."""
    for _ in range(MAX_DRAWS):
        row = []
        value = _append_argument(rng, row, max_length, max_depth, max_args)
        if value is not None and len(row) >= min_length:
            return row, value
    raise ValueError(
        f"`min_length` and `max_length`: no sequence of {min_length} to {max_length} tokens in "
        f"{MAX_DRAWS:,} draws with `max_depth={max_depth}` and `max_args={max_args}`. Choose a "
        "wider range of lengths, or other lengths."
    )


def _append_argument(rng, row, room, depth, max_args):
    """Appends a digit or a list to `row`. Returns its value, or None if it exceeds `room`."""
    if depth == 1 or rng.random() >= LIST_PROBABILITY:
        digit = rng.randrange(DIGITS)
        row.append(FIRST_DIGIT + digit)
        return digit if len(row) <= room else None
    operator = rng.randrange(len(OPERATORS))
    row.append(FIRST_OPERATOR + operator)
    values = []
    for _ in range(rng.randint(2, max_args)):
        value = _append_argument(rng, row, room, depth - 1, max_args)
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
    check_positive_integers(
        num_examples=num_examples,
        min_length=min_length,
        max_length=max_length,
        max_depth=max_depth,
        max_args=max_args,
    )
    if max_args < 2:
        raise ValueError(f"`max_args` must be at least 2, as in every list; got {max_args}.")
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
            f"`min_length` must be at most {longest}, the longest sequence with "
            f"`max_depth={max_depth}` and `max_args={max_args}`; got {min_length}."
        )
