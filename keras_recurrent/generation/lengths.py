"""Which lengths of rows share a program, how prompts are cut, and how much room a cache has."""

SHORTEST, FACTOR, FINE = 64, 4, 1024
SHORTEST_PIECE, PIECES = 256, 16
TOKENS_AT_ONCE = 16_384  # of all rows: some 1.5 GiB in a model of two billion parameters


def bucket(length):
    """The length that rows of `length` tokens are padded to: 64, 256, 1024, then powers of two.

    So rows of 1 to 32,768 tokens take eight programs at most. From 1024 on, the room in the caches
    of global attention is at most twice what is needed.
    """
    room = SHORTEST
    while room < length:
        room *= FACTOR if room < FINE else 2
    return room


def longest_piece(batch_size):
    """How many tokens of each row are read at once at most, a power of two."""
    share = max(SHORTEST_PIECE, TOKENS_AT_ONCE // batch_size)
    return 1 << share.bit_length() - 1


def piece(batch_size, room):
    """How many tokens of rows of `room` tokens are read at once, where they are many."""
    return min(room, longest_piece(batch_size), max(SHORTEST_PIECE, room // PIECES))


def initial_cache(model, batch_size, length, keep):
    """The cache in which nothing was seen.

    Args:
        model: a language model.
        batch_size: integer, rows.
        length: integer, how many tokens a row will have.
        keep: whether it will be gone on with afterwards. Then it has room for as many tokens as
            there will be, unless a block attends to all tokens.
    """
    room = None if keep and model.backbone.keeps_state else bucket(length)
    return model.backbone.get_initial_state(batch_size, max_length=room)
