"""Checks of token ids and segments on the host.

Values on a device are not checked, because reading them would synchronize.
"""

import numpy as np


def check_token_ids(name, token_ids, vocabulary_size, counts=None, hint=""):
    """Raises an error for ids outside the vocabulary in a NumPy array in memory.

    Tensors and memory-mapped files are not checked.

    Args:
        name: string, the argument.
        token_ids: integers of any shape.
        vocabulary_size: integer.
        counts: an array with the shape of `token_ids`, 0 or False at ids to ignore. None: all ids
            are checked.
        hint: string, advice that is appended to the message.

    Raises:
        ValueError: an id is below 0, or at least `vocabulary_size`.
    """
    index = _find_first(lambda ids: (ids < 0) | (ids >= vocabulary_size), token_ids, counts)
    if index is not None:
        raise ValueError(
            f"`{name}` must be ids from 0 to {vocabulary_size - 1}, the vocabulary of the model; "
            f"got {token_ids[index]} at {list(index)}.{hint and ' ' + hint}"
        )


def check_segment_ids(segment_ids, padding_mask=None):
    """Raises an error for segments below 0 at real tokens in a NumPy array in memory.

    Args:
        segment_ids: integers of any shape.
        padding_mask: an array with the shape of `segment_ids`, 0 or False at padding, which is not
            checked. None: no padding.

    Raises:
        ValueError: a segment is below 0.
    """
    index = _find_first(lambda segments: segments < 0, segment_ids, padding_mask)
    if index is not None:
        raise ValueError(
            "`segment_ids` must be numbers of documents, at least 0; got "
            f"{segment_ids[index]} at {list(index)}. Count documents from 0 or 1, and mark padding "
            "with `padding_mask`."
        )


def _find_first(is_bad, array, counts):
    """Returns the index of the first bad integer, or None if there is none or it is unknown.

    counts: an array with the shape of `array`, 0 or False at integers to ignore, or None.
    """
    if not _is_in_memory(array) or array.dtype.kind not in "iu" or not array.size:
        return None
    bad = is_bad(array)
    if bad.any() and counts is not None:
        if not _is_in_memory(counts) or counts.shape != array.shape:
            return None
        bad &= counts != 0
    return tuple(int(i) for i in np.argwhere(bad)[0]) if bad.any() else None


def _is_in_memory(array):
    return isinstance(array, np.ndarray) and not isinstance(array, np.memmap)
