"""Multi-query associative recall: key-value pairs, followed by keys as queries."""

import numpy as np

from keras_recurrent.checks.arguments import check_positive_integers


def associative_recall(
    num_examples,
    num_pairs,
    sequence_length,
    vocabulary_size,
    *,
    num_queries=None,
    power=0.01,
    seed=0,
):
    """Generates examples of multi-query associative recall (MQAR), ready for `fit`.

    ```
    tokens    5 13  2 11  7  8  0  0  2  0  0  0  7  0  5  0
    labels    .  .  .  .  .  .  .  . 11  .  .  .  8  . 13  .
    ```

    Arora et al. 2023 (arXiv:2312.04927, section 4). A sequence begins with pairs of a key and its
    value. Then keys are repeated as queries, separated by the token 0, and the model must predict
    the value of each. It must store all pairs of a sequence at once: the number of pairs that it
    recalls measures the capacity of its state.

    The keys of a sequence are distinct, as are its values and its queries. Tokens from 1 up to
    half the vocabulary are keys, tokens of the other half are values.

    Args:
        num_examples: integer, number of sequences.
        num_pairs: integer, pairs in a sequence.
        sequence_length: integer, tokens in a sequence.
        vocabulary_size: integer, number of token ids.
        num_queries: integer, queries in a sequence. None: one for each pair.
        power: float, a: queries are at even distances 2 g after the pairs, drawn with a probability
            proportional to g^(a - 1). 1 is uniform; with smaller values, more queries are near the
            pairs.
        seed: integer, seed of NumPy's generator. Equal arguments give equal examples.

    Returns:
        `(tokens, labels, weights)`, each `[num_examples, sequence_length]`: int32 tokens; int32
        labels, 0 at positions without a query; and float32 weights, 1 at queries and 0 elsewhere.
        They are the `x`, `y` and `sample_weight` of `fit`.

    Raises:
        ValueError: a number is not an integer of at least 1; `power` is not above 0; there are more
            pairs than keys in the vocabulary, or more queries than pairs; or `sequence_length` is
            too short for pairs and queries.

    Example:

    >>> import numpy as np
    >>> tokens, labels, weights = associative_recall(
    ...     num_examples=1, num_pairs=3, sequence_length=16, vocabulary_size=16, power=1.0
    ... )
    >>> pairs = dict(zip(tokens[0, :6:2], tokens[0, 1:6:2]))
    >>> queries = np.flatnonzero(weights[0])
    >>> [pairs[key] for key in tokens[0, queries]] == list(labels[0, queries])
    True
    """
    num_queries = num_pairs if num_queries is None else num_queries
    _check(num_examples, num_pairs, num_queries, sequence_length, vocabulary_size, power)
    slots = (sequence_length - 2 * num_pairs) // 2
    rng = np.random.default_rng(seed)
    half = vocabulary_size // 2
    keys = 1 + _draw_distinct(rng, num_examples, np.zeros(half - 1), num_pairs)
    values = half + _draw_distinct(rng, num_examples, np.zeros(vocabulary_size - half), num_pairs)

    tokens = np.zeros((num_examples, sequence_length), "int32")
    labels, weights = np.zeros_like(tokens), np.zeros(tokens.shape, "float32")
    tokens[:, : 2 * num_pairs : 2] = keys
    tokens[:, 1 : 2 * num_pairs : 2] = values
    asked = _draw_distinct(rng, num_examples, np.zeros(num_pairs), num_queries)
    near_first = (power - 1) * np.log(np.arange(1, slots + 1))
    distance = _draw_distinct(rng, num_examples, near_first, num_queries)
    positions = 2 * (num_pairs + distance)
    np.put_along_axis(tokens, positions, np.take_along_axis(keys, asked, axis=1), axis=1)
    np.put_along_axis(labels, positions, np.take_along_axis(values, asked, axis=1), axis=1)
    np.put_along_axis(weights, positions, 1.0, axis=1)
    return tokens, labels, weights


def _draw_distinct(rng, num_examples, log_weights, count):
    """Draws `count` distinct indices into `log_weights` per example: `[num_examples, count]`."""
    # The largest sums of log weights and Gumbel noise are a sample without replacement.
    noise = rng.gumbel(size=(num_examples, len(log_weights)))
    return np.argsort(-(log_weights + noise), axis=1)[:, :count]


def _check(num_examples, num_pairs, num_queries, sequence_length, vocabulary_size, power):
    check_positive_integers(
        num_examples=num_examples,
        num_pairs=num_pairs,
        num_queries=num_queries,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
    )
    if not power > 0:
        raise ValueError(f"`power` must be above 0; got {power}.")
    if vocabulary_size // 2 - 1 < num_pairs:
        raise ValueError(
            f"`vocabulary_size` must be at least {2 * num_pairs + 2}, for a key of each pair ("
            f"{num_pairs}), as many values and the token 0; got "
            f"{vocabulary_size}."
        )
    if num_queries > num_pairs:
        raise ValueError(
            f"`num_queries` must be at most `num_pairs`, {num_pairs}: each key is queried at most "
            f"once; got {num_queries}."
        )
    if sequence_length // 2 < num_pairs + num_queries:
        raise ValueError(
            f"`sequence_length` must be at least {2 * (num_pairs + num_queries)}, two tokens for "
            f"each pair ({num_pairs}) and each query ({num_queries}); got {sequence_length}."
        )
