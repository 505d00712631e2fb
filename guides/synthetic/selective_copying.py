"""Selective copying: data tokens among noise, to be repeated in order."""

import numpy as np

from keras_recurrent.checks.arguments import check_positive_integer


def selective_copying(
    num_examples, *, num_data=16, sequence_length=1024, vocabulary_size=16, seed=0
):
    """Generates examples of selective copying, ready for `fit`.

    ```
    tokens    0 5 0 0 3 8 0 0 9 9 9
    labels    . . . . . . . . 5 3 8
    ```

    Gu & Dao 2023 (arXiv:2312.00752, section 3.1), as in Griffin (De et al. 2024,
    arXiv:2402.19427, section 6.1 and appendix H), whose sizes are the defaults. A sequence begins
    with `num_data` data tokens at random positions among noise and ends with `num_data` query
    tokens, at which the model must predict the data in order. It must separate data from noise,
    count it and store all of it. The distances between data tokens vary, so no fixed offset can be
    learned.

    The token 0 is noise, the last token of the vocabulary is the query, and the others are data.
    Data tokens and the sets of their positions are drawn independently and uniformly.

    Args:
        num_examples: integer, number of sequences.
        num_data: integer, data tokens in a sequence.
        sequence_length: integer, tokens in a sequence, including the queries.
        vocabulary_size: integer, number of token ids.
        seed: integer, seed of NumPy's generator. Equal arguments give equal examples.

    Returns:
        `(tokens, labels, weights)`, each `[num_examples, sequence_length]`: int32 tokens; int32
        labels, 0 before the queries; and float32 weights, 1 at the last `num_data` positions and 0
        elsewhere. They are the `x`, `y` and `sample_weight` of `fit`.

    Raises:
        ValueError: a number is not an integer of at least 1, `vocabulary_size` is below 3, or
            `sequence_length` is below twice `num_data`.

    Example:

    >>> tokens, labels, weights = selective_copying(1, num_data=3, sequence_length=12)
    >>> data = tokens[0, :9]
    >>> list(data[data > 0]) == list(labels[0, weights[0] > 0])
    True
    """
    sizes = {"num_examples": num_examples, "num_data": num_data, "sequence_length": sequence_length}
    for name, size in {**sizes, "vocabulary_size": vocabulary_size}.items():
        check_positive_integer(name, size)
    if vocabulary_size < 3:
        raise ValueError(
            "`vocabulary_size` must be at least 3, for data, noise and the query token; got "
            f"{vocabulary_size}."
        )
    if sequence_length < 2 * num_data:
        raise ValueError(
            f"`sequence_length` must be at least {2 * num_data}, twice `num_data`; got "
            f"{sequence_length}."
        )
    rng = np.random.default_rng(seed)
    tokens = np.zeros((num_examples, sequence_length), "int32")
    labels, weights = np.zeros_like(tokens), np.zeros(tokens.shape, "float32")
    data = rng.integers(1, vocabulary_size - 1, (num_examples, num_data))
    noise = rng.random((num_examples, sequence_length - num_data))
    positions = np.sort(np.argpartition(noise, num_data - 1, axis=1)[:, :num_data], axis=1)
    np.put_along_axis(tokens, positions, data, axis=1)
    tokens[:, -num_data:] = vocabulary_size - 1
    labels[:, -num_data:], weights[:, -num_data:] = data, 1.0
    return tokens, labels, weights
