"""The tokenizer of the HGRN2 presets."""

import keras

from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2Tokenizer(ByteTokenizer):
    """The `ByteTokenizer` by the name that KerasHub finds for an HGRN2 preset.

    KerasHub looks tokenizers up by their backbone, so every family of models has a class of its
    own. A `ByteTokenizer` serves as well wherever one is passed by hand, and a checkpoint brings
    its own (see `keras_recurrent.tokenizers.SentencePieceTokenizer`).

    Example:

    >>> import keras_hub
    >>> import keras_recurrent
    >>> tokenizer = keras_hub.tokenizers.Tokenizer.from_preset("hgrn2_tiny")
    >>> tokenizer("hi")
    array([107, 108], dtype=int32)
    """

    backbone_cls = HGRN2Backbone
