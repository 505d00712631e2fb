"""Phone book lookup: names with numbers, followed by names as queries."""

import numpy as np

from keras_recurrent.checks.arguments import check_positive_integers

DIGITS = 10
FIRST_DIGIT = 1
FIRST_NAME = FIRST_DIGIT + DIGITS


def phone_book(
    num_examples,
    num_names,
    *,
    num_queries=3,
    name_length=2,
    number_length=7,
    vocabulary_size=64,
    seed=0,
):
    """Generates examples of phone book lookup, ready for `fit`.

    ```
    tokens    0 40 21 3 9  0 13 58 7 7  0 25 40 1 5  0 13 58 7 7
    labels    .  .  . . .  .  .  . . .  .  .  . . .  .  .  7 7 .
    ```

    Jelassi et al. 2024 (arXiv:2402.01032, section 3.2), as in Griffin (De et al. 2024,
    arXiv:2402.19427, section 6.2, figure 6c). A sequence is a book of names, each with its number,
    followed by some of its names as queries, again with their numbers. The model predicts the
    digits of the queries, each from the tokens before it. The papers train models on text from the
    web and evaluate them on this task, with two queries as examples and a third one as the test.
    Here the model is trained on the task itself.

    The token 0 begins each line, tokens 1 to 10 are digits, and all other tokens are parts of
    names. A name is `name_length` tokens, drawn independently; the names of a book are distinct,
    as are the queries. Digits are drawn independently. The book has `num_names` lines of
    `1 + name_length + number_length` tokens; queries are lines of that length, too.

    Args:
        num_examples: integer, number of sequences.
        num_names: integer, names in a book.
        num_queries: integer, queries in a sequence.
        name_length: integer, tokens of a name.
        number_length: integer, digits of a number.
        vocabulary_size: integer, number of token ids.
        seed: integer, seed of NumPy's generator. Equal arguments give equal examples.

    Returns:
        `(tokens, labels, weights)`, each `[num_examples, T]`, with T the number of tokens of all
        lines: int32 tokens; int32 labels, the next token if it is a digit of a query, and 0
        elsewhere; and float32 weights, 1 at those positions and 0 elsewhere. They are the `x`, `y`
        and `sample_weight` of `fit`. `weights[:, -line:]`, with the length of a line, is the last
        query.

    Raises:
        ValueError: a number is not an integer of at least 1, there are more queries than names, or
            the vocabulary has fewer names than the book.

    Example:

    >>> tokens, labels, weights = phone_book(1, num_names=4, num_queries=1, number_length=3)
    >>> book, query = tokens[0, :24].reshape(4, 6), tokens[0, 24:]
    >>> (line,) = [line for line in book if list(line[:3]) == list(query[:3])]
    >>> list(line[3:]) == list(labels[0, weights[0] > 0])
    True
    """
    check_positive_integers(
        num_examples=num_examples,
        num_names=num_names,
        num_queries=num_queries,
        name_length=name_length,
        number_length=number_length,
        vocabulary_size=vocabulary_size,
    )
    if num_queries > num_names:
        raise ValueError(
            f"`num_queries` must be at most `num_names`, {num_names}; got {num_queries}."
        )
    parts = vocabulary_size - FIRST_NAME
    if max(0, parts) ** name_length < num_names:
        raise ValueError(
            f"`vocabulary_size` must leave enough tokens for names after the {FIRST_NAME} tokens "
            f"of lines and digits: {max(0, parts)} tokens in names of {name_length} make "
            f"{max(0, parts) ** name_length} names, and `num_names` is {num_names}."
        )
    rng = np.random.default_rng(seed)
    line = 1 + name_length + number_length
    book = np.zeros((num_examples, num_names, line), "int32")
    for row in book:
        row[:, 1 : 1 + name_length] = _draw_names(rng, num_names, name_length, parts)
    shape = num_examples, num_names, number_length
    book[:, :, 1 + name_length :] = FIRST_DIGIT + rng.integers(0, DIGITS, shape)
    asked = np.argsort(rng.random((num_examples, num_names)), axis=1)[:, :num_queries]
    queries = np.take_along_axis(book, asked[:, :, None], axis=1)

    tokens = np.concatenate([book, queries], axis=1)
    labels, weights = np.zeros_like(tokens), np.zeros(tokens.shape, "float32")
    labels[:, num_names:, name_length:-1] = queries[:, :, 1 + name_length :]
    weights[:, num_names:, name_length:-1] = 1.0
    return tuple(array.reshape(num_examples, -1) for array in (tokens, labels, weights))


def _draw_names(rng, count, length, parts):
    """Draws `count` distinct names: tokens [count, length]."""
    if parts**length <= 4 * count:  # permute all possible names
        chosen = rng.permutation(parts**length)[:count]
        return FIRST_NAME + np.stack(np.unravel_index(chosen, (parts,) * length), axis=1)
    names = np.empty((0, length), "int64")
    while len(names) < count:  # duplicates are rare among so many
        drawn = np.concatenate([names, rng.integers(0, parts, (2 * count, length))])
        names = drawn[np.sort(np.unique(drawn, axis=0, return_index=True)[1])]
    return FIRST_NAME + names[:count]
