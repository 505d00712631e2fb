"""Models that read packed documents, but do not ask for them."""

import numpy as np
from keras import ops

from keras_recurrent.checks.shapes import check_rank_known, fits
from keras_recurrent.devices.torch_processes import check_not_sharded


class SegmentsOptional:
    """Lets a functional model take `segment_ids` beside the inputs of its graph, or leave them out.

    KerasHub's models take `token_ids` and `padding_mask`, and so do the graphs here: what is made
    of a graph alone, such as a clone or an exported program, then takes what a preprocessor makes.
    Segments go around the graph, through `call_with_segments`. (Keras's optional inputs would not
    do: a dictionary must name them all the same, and a SavedModel needs their tensors.) A graph
    that does have `segment_ids`, that of a model with a packing preprocessor, gets zeros where
    none are given: a row is then one document.

    Keras calls a model by `__call__` and, on JAX, by `call` alone.
    """

    def call_with_segments(self, token_ids, padding_mask, segment_ids):
        """The model's outputs for rows of several documents."""
        raise NotImplementedError

    def __call__(self, inputs, *args, **kwargs):
        check_not_sharded(self)
        for name, tensor in inputs.items() if isinstance(inputs, dict) else ():
            check_rank_known(type(self).__name__, name, tensor)
        _check_padding_mask(inputs)
        inputs = self._with_segments_of_graph(inputs)
        return super().__call__(inputs, *args, **kwargs)  # type: ignore[misc]

    def call(self, inputs, training=None, mask=None):
        inputs = self._with_segments_of_graph(inputs)
        if self._goes_around_graph(inputs):
            names = ("token_ids", "padding_mask", "segment_ids")
            return self.call_with_segments(
                *(ops.convert_to_tensor(inputs[name], "int32") for name in names)
            )
        return super().call(inputs, training=training, mask=mask)  # type: ignore[misc]

    def compute_output_spec(self, inputs, training=None, mask=None):
        if self._goes_around_graph(inputs):
            inputs = {name: inputs[name] for name in self.input}  # type: ignore[attr-defined]
        return super().compute_output_spec(inputs, training, mask)  # type: ignore[misc]

    def _goes_around_graph(self, inputs):
        given = isinstance(inputs, dict) and "segment_ids" in inputs
        return given and "segment_ids" not in self.input  # type: ignore[attr-defined]

    def _with_segments_of_graph(self, inputs):
        if not isinstance(inputs, dict) or inputs.get("segment_ids") is not None:
            return inputs
        inputs = {name: tensor for name, tensor in inputs.items() if name != "segment_ids"}
        if "segment_ids" in self.input and "token_ids" in inputs:  # type: ignore[attr-defined]
            token_ids = inputs["token_ids"]
            zeros_like = np.zeros_like if isinstance(token_ids, np.ndarray) else ops.zeros_like
            inputs["segment_ids"] = zeros_like(token_ids, dtype="int32")
        return inputs


def _check_padding_mask(inputs):
    names = "token_ids", "padding_mask"
    tensors = [inputs.get(name) for name in names] if isinstance(inputs, dict) else []
    shapes = [tuple(t.shape) for t in tensors if t is not None and hasattr(t, "shape")]
    if len(shapes) == 2 and not fits(*shapes):
        raise ValueError(
            "`padding_mask` must have the shape [batch, time] of `token_ids`, "
            f"{shapes[0]}; got {shapes[1]}."
        )
