"""Models that read packed documents, but do not ask for them."""

import numpy as np
from keras import ops


class SegmentsOptional:
    """Lets a functional model with an input `segment_ids` be called without it.

    KerasHub's models take `token_ids` and `padding_mask`; where nothing is said about documents, a
    row is one document. (Keras's optional inputs do not reach all paths: symbolic calls need the
    tensor.) Keras calls a model by `__call__` and, on JAX, by `call` alone.
    """

    def __call__(self, inputs, *args, **kwargs):
        inputs = _with_segments(inputs)
        return super().__call__(inputs, *args, **kwargs)  # type: ignore[misc]

    def call(self, inputs, training=None, mask=None):
        inputs = _with_segments(inputs)
        return super().call(inputs, training=training, mask=mask)  # type: ignore[misc]


def _with_segments(inputs):
    if isinstance(inputs, dict) and "token_ids" in inputs and "segment_ids" not in inputs:
        token_ids = inputs["token_ids"]
        zeros_like = np.zeros_like if isinstance(token_ids, np.ndarray) else ops.zeros_like
        return {**inputs, "segment_ids": zeros_like(token_ids, dtype="int32")}
    return inputs
