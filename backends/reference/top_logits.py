"""The largest logits of each row, and the logarithm of the sum of exp of all.

Numbers are in descending order, equal ones by index; NaN is largest.
"""

import numpy as np

from ._common import cast


def top_logits(x, count, dtype=np.float64):
    """x: [B, V]. Returns (values [B, count], int32 indices [B, count], log sum [B])."""
    (x,) = cast(dtype, x)
    order = np.lexsort((-np.nan_to_num(x, nan=np.inf), ~np.isnan(x)), axis=-1)  # is stable
    indices = order[:, :count]
    highest = x.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        log_sum = highest[:, 0] + np.log(np.exp(x - highest).sum(axis=-1))
    return np.take_along_axis(x, indices, axis=1), indices.astype(np.int32), log_sum
