"""The index of the largest number of each row; of equal numbers the first one; NaN is largest."""

import numpy as np


def argmax(x, masks=None):
    """x: [B, V], masks: uint8 [B, N]. Returns int32 [B].

    A number of x counts as -inf if its bit in masks is 0; the lowest bit is the first.
    """
    if masks is not None:
        bits = np.unpackbits(masks, axis=1, bitorder="little")
        x = np.where(bits[:, : x.shape[1]] == 1, x, -np.inf)
    return np.argmax(x, axis=-1).astype(np.int32)
