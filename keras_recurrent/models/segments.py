"""Optional `segment_ids` input for packed documents."""

from typing import Any

import numpy as np
from keras import ops

from keras_recurrent.checks.shapes import check_rank_known, fits


class SegmentsOptional:
    """Mixin that lets a functional model take `segment_ids` that its graph does not have.

    The graphs take `token_ids` and `padding_mask`, like KerasHub's models, so that clones and
    exported programs, which are made from the graph, take the outputs of a preprocessor. Calls with
    segments bypass the graph through `call_with_segments`. (Keras's optional inputs do not suffice:
    a dictionary must name them, and a SavedModel needs their tensors.) The graph of a model with a
    packing preprocessor has `segment_ids`; zeros are the default, for one document per sequence.

    Keras calls a model by `__call__` and, on JAX, also directly by `call`.
    """

    def call_with_segments(self, token_ids, padding_mask, segment_ids):
        """Computes the outputs for packed sequences."""
        raise NotImplementedError

    def __call__(self, inputs, *args, **kwargs):
        for name, tensor in inputs.items() if isinstance(inputs, dict) else ():
            check_rank_known(type(self).__name__, name, tensor)
        _check_padding_mask(inputs)
        inputs = self._fill_segments(inputs)
        return super().__call__(inputs, *args, **kwargs)  # type: ignore[misc]

    def check_num_tokens(self, num_tokens):
        """Raises an error for a sequence of too many tokens; None is an unknown number."""
        self.backbone.check_num_tokens(num_tokens)  # type: ignore[attr-defined]

    def call(self, inputs, training=None, mask=None):
        inputs = self._fill_segments(inputs)
        if isinstance(inputs, dict) and "token_ids" in inputs:
            self.check_num_tokens(inputs["token_ids"].shape[1])
        if self._bypasses_graph(inputs):
            names = ("token_ids", "padding_mask", "segment_ids")
            tensors = (inputs.get(name) for name in names)
            return self.call_with_segments(
                *(t if t is None else ops.convert_to_tensor(t, "int32") for t in tensors)
            )
        return super().call(inputs, training=training, mask=mask)  # type: ignore[misc]

    def compute_output_spec(self, inputs, training=None, mask=None):
        if self._bypasses_graph(inputs):
            inputs = {name: inputs[name] for name in self.input}  # type: ignore[attr-defined]
        return super().compute_output_spec(inputs, training, mask)  # type: ignore[misc]

    def _bypasses_graph(self, inputs):
        given = isinstance(inputs, dict) and "segment_ids" in inputs
        return given and "segment_ids" not in self.input  # type: ignore[attr-defined]

    def _fill_segments(self, inputs):
        if not isinstance(inputs, dict) or inputs.get("segment_ids") is not None:
            return inputs
        inputs = {name: tensor for name, tensor in inputs.items() if name != "segment_ids"}
        if "segment_ids" in self.input and "token_ids" in inputs:  # type: ignore[attr-defined]
            token_ids = inputs["token_ids"]
            zeros_like = np.zeros_like if isinstance(token_ids, np.ndarray) else ops.zeros_like
            inputs["segment_ids"] = zeros_like(token_ids, dtype="int32")
        return inputs


def _check_padding_mask(inputs):
    if not isinstance(inputs, dict):
        return
    token_ids: Any = inputs.get("token_ids")
    padding_mask: Any = inputs.get("padding_mask")
    if not (hasattr(token_ids, "shape") and hasattr(padding_mask, "shape")):
        return
    if not fits(token_ids.shape, padding_mask.shape):
        raise ValueError(
            "`padding_mask` must have the shape [batch, time] of `token_ids`, "
            f"{tuple(token_ids.shape)}; got {tuple(padding_mask.shape)}."
        )
