"""Byte tokenizer with start, end and padding tokens."""

import keras
import keras_hub

from keras_recurrent.compat import canonicalize_python_token_inputs, preprocessing_function
from keras_recurrent.families import FamilyMember
from keras_recurrent.inherited_docstrings import InheritedDocstring
from keras_recurrent.tokenizers.checkpoint_files import TrustedTexts
from keras_recurrent.tokenizers.plain import FIRST_BYTE, PlainByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class ByteTokenizer(
    TrustedTexts, FamilyMember, InheritedDocstring, keras_hub.tokenizers.ByteTokenizer
):
    """Tokenizes text as UTF-8 bytes, without a vocabulary file and without unknown tokens.

    Tokens are 0 for padding, 1 for the start and 2 for the end of a document, and 3 to 258 for the
    bytes 0 to 255: `vocabulary_size()` is 259. Text is neither lowercased nor normalized, so
    `detokenize(tokenize(text)) == text`. It runs with or without TensorFlow installed, also inside
    `tf.data` and Grain pipelines.

    Args:
        errors: `"replace"`, `"ignore"` or `"strict"`: the treatment by `detokenize` of bytes that
            are not valid UTF-8, which a model may generate, and of ids of 259 and more. Defaults to
            `"replace"`, which yields U+FFFD.
        dtype: integer dtype of the tokens. Defaults to `"int32"`.
        **kwargs: `name`, as for any layer.

    KerasHub finds tokenizers by their backbone, so each family of models has a subclass. Code may
    also pass a `ByteTokenizer`.

    Call arguments:
        inputs: a string, or a list, array or tensor of strings.

    Returns:
        A list of tokens for every string, an array for a single string, a ragged tensor inside
        `tf.data`. The preprocessor adds start and end tokens.

    Raises:
        ValueError: `dtype` is not an integer type, or `errors` is unknown; in `detokenize` with
            `errors="strict"`, for bytes that are not valid UTF-8.

    Example:

    >>> from keras_recurrent.tokenizers import ByteTokenizer
    >>> tokenizer = ByteTokenizer()
    >>> tokenizer(["hi", "é"])
    [[107, 108], [198, 172]]
    >>> tokenizer.detokenize([[1, 107, 108, 2, 0], [198, 172]])
    ['hi', 'é']
    >>> tokenizer.start_token_id, tokenizer.end_token_id, tokenizer.pad_token_id
    (1, 2, 0)
    """

    def __init__(self, errors="replace", dtype="int32", **kwargs):
        self._add_special_token("<start>", "start_token")
        self._add_special_token("<end>", "end_token")
        self._add_special_token("<pad>", "pad_token")
        super().__init__(lowercase=False, errors=errors, dtype=dtype, **kwargs)
        # There are no weights to build, but `quantize` of a model rejects layers not built.
        self.built = True

    @property
    def _core(self):
        return PlainByteTokenizer(self.errors)

    def get_vocabulary(self):
        """Returns `{token: id}` of all tokens. The token of a byte is the character of its code."""
        return {self.id_to_token(id): id for id in range(self.vocabulary_size())}

    def tokenize(self, inputs):
        return _shift(super().tokenize(inputs))

    @preprocessing_function
    def _tokenize_tf(self, inputs):
        # KerasHub's method fails on a single empty string.
        import tensorflow as tf

        single = inputs.shape.rank == 0
        tokens = tf.strings.bytes_split(inputs[None] if single else inputs)
        codes = tf.reshape(tf.io.decode_raw(tokens.flat_values, tf.uint8), [-1])
        tokens = tokens.with_flat_values(tf.cast(codes, self.compute_dtype))
        return tokens.flat_values if single else tokens

    def _detokenize_python(self, inputs):
        inputs, batched = canonicalize_python_token_inputs(inputs)
        texts = self._core.detokenize(inputs)
        return texts if batched else texts[0]

    @preprocessing_function
    def _detokenize_tf(self, inputs):
        import tensorflow as tf

        single = isinstance(inputs, tf.Tensor) and inputs.shape.rank == 1
        ids = tf.expand_dims(inputs, 0) if single else inputs
        ids = tf.ragged.boolean_mask(ids, ids >= FIRST_BYTE)
        codes = tf.minimum(ids - FIRST_BYTE, 255)
        texts = tf.strings.reduce_join(tf.gather([bytes([i]) for i in range(256)], codes), axis=-1)
        texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors=self.errors)
        return tf.squeeze(texts, 0) if single else texts

    def save_assets(self, dir_path):
        """Does nothing: the vocabulary is fixed."""

    def load_assets(self, dir_path):
        """Does nothing: the vocabulary is fixed."""

    def load_preset_assets(self, preset):
        """Does nothing: the vocabulary is fixed."""

    def get_config(self):
        config = super().get_config()
        # Arguments that a lossless byte tokenizer does not use.
        for key in ("lowercase", "sequence_length", "normalization_form", "replacement_char"):
            del config[key]
        return config


def _shift(tokens):
    """Shifts ids past the special tokens, in nested lists, arrays and ragged tensors."""
    if isinstance(tokens, list):
        return [_shift(t) for t in tokens]
    return tokens + FIRST_BYTE
