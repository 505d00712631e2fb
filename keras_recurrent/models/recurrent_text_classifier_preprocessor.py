"""Preprocessor of the text classifiers."""

import keras
import keras_hub

from keras_recurrent.atomic_files import AtomicPreset
from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.families import FamilyMember
from keras_recurrent.inherited_docstrings import InheritedDocstring


class RecurrentTextClassifierPreprocessor(
    AtomicPreset, FamilyMember, InheritedDocstring, keras_hub.models.TextClassifierPreprocessor
):
    """Converts strings to the inputs of the text classifiers, one sequence of tokens for each.

    A sequence is the start token, if the tokenizer has one, the text, the end token and padding. A
    text that is too long is truncated, and the end token is kept: the classifiers use its hidden
    state. A pair of texts is one sequence, `<start> first <end> second <end>`; both are truncated
    if they are too long.

    Args:
        tokenizer: the tokenizer of the family, a `ByteTokenizer`, or any KerasHub tokenizer with
            start, end and padding tokens.
        sequence_length: integer, tokens in a sequence, at least 3. Defaults to 512.
        truncate: `"round_robin"`, which truncates both texts of a pair evenly, or `"waterfall"`,
            which truncates the second text first.
        **kwargs: `name`, as for any layer.

    Call arguments:
        x: a string, or a list, array or tensor of strings. Pass a pair as a tuple of two of these
            by keyword, `preprocessor(x=(first, second))`; KerasHub takes a positional tuple as
            (x, y). A model takes pairs in the same form: `model.fit((first, second), labels)`.
        y, sample_weight: labels and their weights, returned unchanged.

    Returns:
        x as a dictionary of `token_ids` and `padding_mask`, `[batch_size, sequence_length]`; with
        labels `(x, y)`, with weights `(x, y, sample_weight)`.

    Raises:
        ValueError: `sequence_length` is not an integer of at least 3, or `truncate` is unknown.

    Example:

    >>> import keras
    >>> from keras_recurrent.models import GriffinTextClassifierPreprocessor
    >>> from keras_recurrent.tokenizers import ByteTokenizer
    >>> preprocessor = GriffinTextClassifierPreprocessor(ByteTokenizer(), sequence_length=6)
    >>> x, y = preprocessor(["abcdef", "a"], [0, 1])
    >>> for part in (x["token_ids"], x["padding_mask"]):
    ...     print(keras.ops.convert_to_numpy(part).astype("int32"))
    [[  1 100 101 102 103   2]
     [  1 100   2   0   0   0]]
    [[1 1 1 1 1 1]
     [1 1 1 0 0 0]]
    """

    def __init__(self, tokenizer, sequence_length=512, truncate="round_robin", **kwargs):
        check_positive_integer("sequence_length", sequence_length)
        if sequence_length < 3:
            raise ValueError(
                "`sequence_length` must be at least 3, for the start token, one token of the text "
                f"and the end token; got {sequence_length}."
            )
        if truncate not in ("round_robin", "waterfall"):
            raise ValueError(f"`truncate` must be 'round_robin' or 'waterfall'; got {truncate!r}.")
        super().__init__(tokenizer, sequence_length=sequence_length, truncate=truncate, **kwargs)

    def build(self, input_shape):
        super().build(input_shape)
        if self.packer.start_value is None:  # a tokenizer without start token
            self.packer.start_value = []
        self.packer.built = True  # `quantize` of a model rejects layers that are not built

    def call(self, x, y=None, sample_weight=None):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
            super().call(x, y=y, sample_weight=sample_weight)
        )
        # KerasHub's `segment_ids` would separate the texts of a pair.
        x = {name: x[name] for name in ("token_ids", "padding_mask")}
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
