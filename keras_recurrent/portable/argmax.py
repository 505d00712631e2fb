"""The index of the largest number of each row."""

import numpy as np
from keras import ops


def argmax(x, masks=None):
    """Returns the first index of the largest number in each row of x `[B, V]`, int32 `[B]`.

    masks: as in `exclude_tokens`, or None.
    """
    x = x if masks is None else exclude_tokens(x, masks)
    return ops.cast(ops.argmax(x, axis=-1), "int32")


def exclude_tokens(logits, masks):
    """Returns logits `[B, V]` that are -inf where a bit is 0 in masks, uint8 `[B, N]`.

    The lowest bit of the first byte belongs to token 0.
    """
    # Made on the device: a CUDA graph cannot copy an array of the host.
    bits = ops.cast(ops.power(2, ops.arange(8, dtype="int32")), "uint8")
    bits = ops.bitwise_and(masks[:, :, None], bits)
    bits = ops.reshape(bits, (-1, 8 * masks.shape[1]))
    return ops.where(ops.equal(bits[:, : logits.shape[-1]], 0), -np.inf, logits)
