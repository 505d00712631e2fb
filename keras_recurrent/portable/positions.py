"""Number of real tokens of its document before each token, computed without sorting."""

from keras import ops

from keras_recurrent.backends.constants import PADDING, STARTS
from keras_recurrent.portable._scan import scan


def positions(kind, first):
    """kind: int8 [B, T]; first: int32 [B], position of a first token that continues a document.

    A recurrence in float32, exact up to 2^24, carries the number of tokens before a document along
    the document. Returns int32 [B, T].
    """
    kind = ops.cast(kind, "int32")
    real = ops.cast(ops.not_equal(kind, PADDING), "int32")
    before = ops.cumsum(real, axis=1) - real
    starts = ops.cast(ops.equal(kind, STARTS), "float32")
    start = scan(1.0 - starts, starts * ops.cast(before, "float32"), -ops.cast(first, "float32"))
    return before - ops.cast(start, "int32")
