"""Checks of token ids that are on the host. To look at those of a device would mean to wait."""

import numpy as np


def check_token_ids(name, token_ids, vocabulary_size, counts=None, hint=""):
    """Raises for ids that the vocabulary lacks, where they are a NumPy array in memory.

    Anything else is left alone: tensors, and files that are mapped into memory.

    Args:
        name: string, the argument.
        token_ids: integers of any shape.
        vocabulary_size: integer.
        counts: an array of the shape of `token_ids`, 0 or False where any number may stand; None:
            all ids count.
        hint: string, what to do about it, after the message.

    Raises:
        ValueError: an id below 0, or `vocabulary_size` and above.
    """
    if not _in_memory(token_ids) or token_ids.dtype.kind not in "iu" or not token_ids.size:
        return
    if token_ids.min() >= 0 and token_ids.max() < vocabulary_size:
        return
    unknown = (token_ids < 0) | (token_ids >= vocabulary_size)
    if counts is not None:
        if not _in_memory(counts) or counts.shape != token_ids.shape:
            return
        unknown &= counts != 0
    if unknown.any():
        place = tuple(int(i) for i in np.argwhere(unknown)[0])
        raise ValueError(
            f"`{name}` must be ids from 0 to {vocabulary_size - 1}, the vocabulary of the model; "
            f"got {token_ids[place]} at {list(place)}.{hint and ' ' + hint}"
        )


def _in_memory(array):
    return isinstance(array, np.ndarray) and not isinstance(array, np.memmap)
