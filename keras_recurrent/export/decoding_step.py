"""Decoding step of a language model, for runtimes without Keras."""

import functools

import keras
import numpy as np
from keras import ops, tree

from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.export.exporters import state_names


class DecodingStep(keras.Model):
    """Decoding step of a language model for export: from a token and a state to logits and a state.

    The inputs are a dictionary of `token_ids` `[B, 1]`, one token of each sequence, and the
    arrays of the state by name. The outputs are a list: logits `[B, 1, vocabulary_size]`, then the
    arrays of the next state in the order of `initial_state`.

    Args:
        model: a language model of this package.
        max_length: integer, the maximum number of tokens of a sequence. Only models with attention
            without a window need it: it is the size of the key and value caches.
        batch_size: integer, the number of sequences, which LiteRT needs. None: any number.

    Attributes:
        initial_state: a dictionary of NumPy arrays by name, the state of one sequence before its
            first token.

    Raises:
        ValueError: a block needs `max_length`, which is missing, or a number is not an integer of
            at least 1.

    Example:

    >>> import numpy as np
    >>> import keras_recurrent
    >>> model = keras_recurrent.models.LFM2CausalLM.from_preset("lfm2_tiny", num_layers=3)
    >>> step = keras_recurrent.exporting.DecodingStep(model, max_length=16)
    >>> logits, *state = step({"token_ids": np.array([[1]]), **step.initial_state})
    >>> tuple(logits.shape)
    (1, 1, 259)

    `step.export("step.onnx", format="onnx")` writes the step to a file.
    """

    def __init__(self, model, max_length=None, batch_size=None):
        super().__init__()
        check_positive_integer("batch_size", batch_size, or_none=True)
        self.language_model = model
        self.batch_size = batch_size
        state = model.backbone.get_initial_state(1, max_length)
        self._pack = functools.partial(tree.pack_sequence_as, state)
        arrays = map(ops.convert_to_numpy, tree.flatten(state))
        self.initial_state = dict(zip(state_names(state), arrays, strict=True))
        self({"token_ids": np.ones((1, 1), "int32"), **self.initial_state})  # builds the model

    def call(self, inputs):
        state = self._pack([inputs[name] for name in self.initial_state])
        logits, _, after = self.language_model.call_with_cache(inputs["token_ids"], state)
        return [logits, *tree.flatten(after)]

    def export(self, filepath, format="tf_saved_model", **kwargs):
        """Exports the step like `keras.Model.export`, with the signature of the inputs above."""
        inputs = {"token_ids": np.ones((1, 1), "int32"), **self.initial_state}
        signature = {
            name: keras.InputSpec(str(array.dtype), (self.batch_size, *array.shape[1:]), name=name)
            for name, array in sorted(inputs.items())
        }
        super().export(filepath, format, input_signature=[signature], **kwargs)
