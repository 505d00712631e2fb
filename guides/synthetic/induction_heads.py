"""Induction heads: recall of the token that followed a special token."""

import numpy as np

from keras_recurrent.checks.arguments import check_positive_integer


def induction_heads(num_examples, *, sequence_length=256, vocabulary_size=16, seed=0):
    """Generates examples of the induction heads task, ready for `fit`.

    ```
    tokens    4 1 15 7 2 2 9 15
    labels    . . .  . . . . 7
    ```

    Gu & Dao 2023 (arXiv:2312.00752, section 4.1.2), as in Griffin (De et al. 2024,
    arXiv:2402.19427, section 6.1 and appendix H), whose sizes are the defaults. A sequence has
    one special token, the last of the vocabulary, at a random position among random tokens, and
    ends with it again. The model must predict the token that followed it. A model that has learned
    the task solves it in sequences far longer than those in training.

    The other tokens and the position of the special one are drawn independently and uniformly.

    Args:
        num_examples: integer, number of sequences.
        sequence_length: integer, tokens in a sequence, at least 3.
        vocabulary_size: integer, number of token ids, at least 2.
        seed: integer, seed of NumPy's generator. Equal arguments give equal examples.

    Returns:
        `(tokens, labels, weights)`, each `[num_examples, sequence_length]`: int32 tokens; int32
        labels, 0 at all positions but the last; and float32 weights, 1 at the last position and 0
        elsewhere. They are the `x`, `y` and `sample_weight` of `fit`.

    Raises:
        ValueError: a number is not an integer of at least 1, `sequence_length` is below 3, or
            `vocabulary_size` is below 2.

    Example:

    >>> tokens, labels, _ = induction_heads(1, sequence_length=8)
    >>> row = list(tokens[0])
    >>> int(row[row.index(15) + 1]) == int(labels[0, -1])
    True
    """
    check_positive_integer("num_examples", num_examples)
    for name, size, least in (
        ("sequence_length", sequence_length, 3),
        ("vocabulary_size", vocabulary_size, 2),
    ):
        check_positive_integer(name, size)
        if size < least:
            raise ValueError(f"`{name}` must be at least {least}; got {size}.")
    rng = np.random.default_rng(seed)
    special = vocabulary_size - 1
    tokens = rng.integers(0, special, (num_examples, sequence_length), dtype="int32")
    labels, weights = np.zeros_like(tokens), np.zeros(tokens.shape, "float32")
    rows, position = np.arange(num_examples), rng.integers(0, sequence_length - 2, num_examples)
    tokens[rows, position] = special
    tokens[:, -1] = special
    labels[:, -1], weights[:, -1] = tokens[rows, position + 1], 1.0
    return tokens, labels, weights
