"""Which lengths of rows share a program, and how long the pieces are in which prompts are read."""

SHORTEST, FACTOR, FINE = 64, 4, 1024
SHORTEST_PIECE, LONGEST_PIECE, PIECES = 256, 4096, 16


def bucket(length):
    """The length that rows of `length` tokens are padded to: 64, 256, 1024, then powers of two.

    So rows of 1 to 32,768 tokens take eight programs at most. From 1024 on, the room in the caches
    of global attention is at most twice what is needed.
    """
    room = SHORTEST
    while room < length:
        room *= FACTOR if room < FINE else 2
    return room


def piece(room):
    """How many tokens of rows of `room` tokens are read at once, where they are many."""
    return min(room, LONGEST_PIECE, max(SHORTEST_PIECE, room // PIECES))
