"""Checks of token ids and segments that are on the host.

To look at those of a device would mean to wait.
"""

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
    place = _first(lambda ids: (ids < 0) | (ids >= vocabulary_size), token_ids, counts)
    if place is not None:
        raise ValueError(
            f"`{name}` must be ids from 0 to {vocabulary_size - 1}, the vocabulary of the model; "
            f"got {token_ids[place]} at {list(place)}.{hint and ' ' + hint}"
        )


def check_segment_ids(segment_ids, padding_mask=None):
    """Raises for segments below 0 at real tokens, where they are a NumPy array in memory.

    Args:
        segment_ids: integers of any shape.
        padding_mask: an array of the shape of `segment_ids`, 0 or False where any number may stand;
            None: all count.

    Raises:
        ValueError: a segment below 0.
    """
    place = _first(lambda segments: segments < 0, segment_ids, padding_mask)
    if place is not None:
        raise ValueError(
            "`segment_ids` must be numbers of documents, at least 0; got "
            f"{segment_ids[place]} at {list(place)}. Count documents from 0 or 1, and tell padding "
            "by `padding_mask`."
        )


def _first(is_bad, array, counts):
    """The place of the first bad integer that counts; None where there is none, or none is seen."""
    if not _in_memory(array) or array.dtype.kind not in "iu" or not array.size:
        return None
    bad = is_bad(array)
    if bad.any() and counts is not None:
        if not _in_memory(counts) or counts.shape != array.shape:
            return None
        bad &= counts != 0
    return tuple(int(i) for i in np.argwhere(bad)[0]) if bad.any() else None


def _in_memory(array):
    return isinstance(array, np.ndarray) and not isinstance(array, np.memmap)
