"""Sequence lengths that share a program, chunk lengths of prompts, and capacities of caches."""

MIN_BUCKET, COARSE_FACTOR, FINE_FROM = 64, 4, 1024
MIN_CHUNK, MAX_CHUNKS = 256, 16
TOKENS_PER_CHUNK = 16_384  # of the whole batch: some 1.5 GiB for a model of 2 billion parameters


def bucket(length):
    """Returns the padded length of sequences: 64, 256, 1024, then powers of two.

    Lengths of 1 to 32,768 tokens take at most eight programs. From 1024 on, the caches of global
    attention have at most twice the capacity that is needed.
    """
    padded = MIN_BUCKET
    while padded < length:
        padded *= COARSE_FACTOR if padded < FINE_FROM else 2
    return padded


def max_chunk_length(batch_size):
    """Returns the maximum number of tokens of each sequence in a chunk, a power of two."""
    share = max(MIN_CHUNK, TOKENS_PER_CHUNK // batch_size)
    return 1 << share.bit_length() - 1


def chunk_length(batch_size, length):
    """Returns the number of tokens of each sequence in a chunk, for sequences padded to `length`.

    It is at least 1/16 of `length`, within the limits, so that a program has few iterations.
    """
    return min(length, max_chunk_length(batch_size), max(MIN_CHUNK, length // MAX_CHUNKS))


def capacity(model, length):
    """Returns the number of tokens of a cache for sequences of `length` tokens, its bucket.

    Raises:
        ValueError: the backbone does not take sequences of this length.
    """
    model.backbone.check_num_tokens(length)
    limit = model.backbone.max_num_tokens
    return bucket(length) if limit is None else min(bucket(length), limit)


def cache_max_length(model, length, keep):
    """Returns the `max_length` of a new cache, or None.

    Args:
        model: a language model.
        length: integer, the final number of tokens of a sequence.
        keep: boolean, True if the cache is used after this call. Its capacity is then unlimited
            unless a block attends to all tokens; otherwise it is `capacity`.
    """
    return None if keep and model.backbone.keeps_state else capacity(model, length)
