"""Strings and labels to what text classifiers train on."""

import keras
import keras_hub

from keras_recurrent.checks.arguments import check_positive_integer


class RecurrentTextClassifierPreprocessor(keras_hub.models.TextClassifierPreprocessor):
    """Turns strings into what the text classifiers read: a row of tokens for each.

    A row is the start token, the text and the end token, and padding behind. Of a text that is too
    long the end is cut off, but never the end token, at which the classifiers read off what they
    know. A pair of texts makes one row, `<start> first <end> second <end>`; both are cut where the
    row is too short.

    Args:
        tokenizer: the family's, a `ByteTokenizer`, or any KerasHub tokenizer with start, end and
            padding tokens.
        sequence_length: integer, tokens a row, at least 3. Defaults to 512.
        truncate: `"round_robin"` or `"waterfall"`: whether a pair that is too long loses tokens at
            both ends in turn, or of the second text first.
        **kwargs: `name`, as for any layer.

    Call arguments:
        x: a string, or a list, array or tensor of strings. A tuple of two of these, by its name as
            in `preprocessor(x=(first, second))`, is a pair; alone, KerasHub takes it for (x, y). A
            model takes pairs in the same form: `model.fit((first, second), labels)`.
        y, sample_weight: labels and their weights, which are handed on.

    Returns:
        x as a dictionary of `token_ids` and `padding_mask`, `[batch_size, sequence_length]`; with
        labels `(x, y)`, with weights `(x, y, sample_weight)`.

    Raises:
        ValueError: a `sequence_length` that is no integer from 3 on, or an unknown `truncate`.

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

    # A family's class says its `backbone_cls` and `tokenizer_cls`, by which KerasHub finds it.

    def __init__(self, tokenizer, sequence_length=512, truncate="round_robin", **kwargs):
        check_positive_integer("sequence_length", sequence_length)
        if sequence_length < 3:
            raise ValueError(
                "`sequence_length` must be at least 3, for the start token, one of the text and "
                f"the end token; got {sequence_length}."
            )
        if truncate not in ("round_robin", "waterfall"):
            raise ValueError(f"`truncate` must be 'round_robin' or 'waterfall'; got {truncate!r}.")
        super().__init__(tokenizer, sequence_length=sequence_length, truncate=truncate, **kwargs)

    def build(self, input_shape):
        super().build(input_shape)
        self.packer.built = True  # a model with layers that are not built refuses to quantize

    def call(self, x, y=None, sample_weight=None):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
            super().call(x, y=y, sample_weight=sample_weight)
        )
        # The network would take these for documents that know nothing of each other.
        x = {name: x[name] for name in ("token_ids", "padding_mask")}
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
