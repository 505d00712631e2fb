"""BPE tokenizer of a `tokenizer.json`, with start, end and padding tokens given by id."""

import itertools
import os

import keras
import keras_hub
import numpy as np

from keras_recurrent import compat
from keras_recurrent.tokenizers.bpe_file import BPEFile, read_bpe_file
from keras_recurrent.tokenizers.checkpoint_files import CheckpointTokenizer, describe_errors

FILE = "tokenizer.json"


@keras.saving.register_keras_serializable(package="keras_recurrent")
class BPETokenizer(CheckpointTokenizer, keras_hub.tokenizers.Tokenizer):
    """Byte-pair encoding from the `tokenizer.json` of a checkpoint, run by Hugging Face tokenizers.

    KerasHub's `BytePairTokenizer` takes a vocabulary and merges and splits words as GPT-2; this
    class uses the normalizer, pre-tokenizer, added tokens and decoder of the file.

    Special tokens in a text, such as `<|im_end|>`, are plain text, so that the text of a user
    cannot end a message. `tokenize_with_special_tokens` converts them to their ids. Special tokens
    are those that the file marks as special, and the start, end and padding token. Other added
    tokens of the file are part of the vocabulary.

    Args:
        tokenizer_json: path or bytes of a `tokenizer.json` file whose model is BPE. None: it is
            loaded later.
        start_token_id: integer. None: texts have no start token.
        end_token_id: integer. The file does not define it; `from_preset` reads it from the
            other files of a checkpoint.
        pad_token_id: integer. None: the end token.
        dtype: integer dtype of the tokens. Defaults to `"int32"`.
        **kwargs: `name`, as for any layer.

    Call arguments:
        inputs: a string, or a list, array or tensor of strings.

    Returns:
        A list of tokens for every string, an array for a single string, a ragged tensor inside
        `tf.data`. The preprocessor adds start and end tokens. `detokenize` converts ids that the
        file does not have, and bytes that are invalid UTF-8, to U+FFFD.

    Raises:
        ValueError: the file is too large, incomplete, inconsistent or not BPE; `end_token_id` is
            missing, or an id is not in the file; `dtype` is not an integer type; a regular
            expression of the file exceeds the library's limit of backtracking on a text.

    Example:

    >>> import tokenizers
    >>> from keras_recurrent.tokenizers import BPETokenizer
    >>> trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    >>> trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    >>> trained.decoder = tokenizers.decoders.ByteLevel()
    >>> trained.train_from_iterator(
    ...     ["all happy families are alike"], tokenizers.trainers.BpeTrainer(
    ...         special_tokens=["<end>"], show_progress=False,
    ...         initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    ...     )
    ... )
    >>> tokenizer = BPETokenizer(trained.to_str().encode(), end_token_id=0)
    >>> tokenizer.detokenize(tokenizer(["happy families", "<end>"]))
    ['happy families', '<end>']
    >>> len(tokenizer("<end>")), tokenizer.tokenize_with_special_tokens("<end>")
    (5, [0])
    """

    file_argument = "tokenizer_json"
    file_description = FILE

    def __init__(
        self,
        tokenizer_json=None,
        *,
        start_token_id=None,
        end_token_id=None,
        pad_token_id=None,
        dtype="int32",
        **kwargs,
    ):
        super().__init__(dtype=dtype, **kwargs)
        if "int" not in self.compute_dtype:
            raise ValueError(f"`dtype` must be an integer type; got {dtype!r}.")
        self._given_ids = {
            "start_token": start_token_id,
            "end_token": end_token_id,
            "pad_token": pad_token_id,
        }
        self.file_assets = [FILE]
        self._file = None
        self._copy_special_tokens(None)
        if tokenizer_json is not None:
            self.set_tokenizer_json(tokenizer_json)
        # There are no weights to build, but `quantize` of a model rejects layers not built.
        self.built = True

    @classmethod
    def from_config(cls, config):
        # A saved configuration must not name a file to read.
        return cls(**{**config, "tokenizer_json": None})

    @property
    def tokenizer_json(self):
        """Bytes of the `tokenizer.json` file, or None if it is not loaded yet."""
        return None if self._file is None else self._file.content

    def set_tokenizer_json(self, tokenizer_json):
        """Loads the file; see the argument `tokenizer_json`."""
        if isinstance(tokenizer_json, (str, os.PathLike)):
            with describe_errors(tokenizer_json):
                self._set_file(read_bpe_file(tokenizer_json))
        elif isinstance(tokenizer_json, bytes):
            with describe_errors(f"`{FILE}`"):
                self._set_file(BPEFile(tokenizer_json))
        elif isinstance(tokenizer_json, BPEFile):
            self._set_file(tokenizer_json)
        else:
            raise ValueError(
                "`tokenizer_json` must be the path of a file, or its bytes; got a "
                f"`{type(tokenizer_json).__name__}`."
            )

    def _set_file(self, file):
        ids = {**self._given_ids}
        if ids["pad_token"] is None:
            ids["pad_token"] = ids["end_token"]
        file.set_special_tokens(**ids)
        self._file = file
        self._copy_special_tokens(file)

    @property
    def _core(self):
        if self._file is None:
            raise ValueError(f"The tokenizer has no file. Pass one as `tokenizer_json`, a {FILE}.")
        return self._file

    # === Vocabulary ===

    @property
    def adds_start_token(self):
        """True if the post-processor of the file begins texts with the start token."""
        start = self.start_token_id
        return start is not None and self._core.prefix()[:1] == [start]

    def get_vocabulary(self):
        """Returns `{token: id}` of all tokens, as the file spells them."""
        return dict(self._core.ids)

    # === Text to tokens ===

    def call(self, inputs, *args, training=None, **kwargs):
        return self.tokenize(inputs, *args, **kwargs)

    def tokenize(self, inputs):
        file = self._core
        if self._use_tf_workflow():
            return self._tokenize_tf(inputs)
        texts, batched, shape = compat.canonicalize_python_string_inputs(inputs)
        ids = file.encode(texts)
        if not batched:
            return np.array(ids[0], self.compute_dtype)
        return ids if shape is None else compat.restore_outer_shape(ids, shape)

    @compat.preprocessing_function
    def _tokenize_tf(self, inputs):
        import tensorflow as tf

        if inputs.shape.rank > 1:
            if isinstance(inputs, tf.Tensor):
                inputs = tf.RaggedTensor.from_tensor(inputs, ragged_rank=inputs.shape.rank - 1)
            return inputs.with_flat_values(self._tokenize_tf(inputs.flat_values))
        dtype = self.compute_dtype

        def encode(texts):
            rows = self._core.encode([text.decode("utf-8", "replace") for text in texts])
            lengths = np.array([len(row) for row in rows], "int64")
            return np.array([id for row in rows for id in row], dtype), lengths

        single = inputs.shape.rank == 0
        texts = inputs[None] if single else inputs
        values, lengths = tf.numpy_function(encode, [texts], (dtype, "int64"), stateful=False)
        values.set_shape([None])
        lengths.set_shape(texts.shape)
        return values if single else tf.RaggedTensor.from_row_lengths(values, lengths)

    # === Tokens to text ===

    @property
    def joins_texts_of_tokens(self):
        """True if the text of a whole character does not depend on the tokens around it."""
        return self._core.joins_texts_of_tokens

    def detokenize(self, inputs):
        file = self._core
        if self._use_tf_workflow():
            return self._detokenize_tf(inputs)
        rows, batched = compat.canonicalize_python_token_inputs(inputs)
        texts = file.detokenize(rows)
        return texts if batched else texts[0]

    @compat.preprocessing_function
    def _detokenize_tf(self, inputs):
        import tensorflow as tf

        single = isinstance(inputs, tf.Tensor) and inputs.shape.rank == 1
        rows = tf.expand_dims(inputs, 0) if single else inputs
        if isinstance(rows, tf.Tensor):
            rows = tf.RaggedTensor.from_tensor(rows)

        def decode(values, splits):
            rows = (values[begin:end] for begin, end in itertools.pairwise(splits))
            texts = [self._core.decode(row.tolist()) for row in rows]
            return np.array([text.encode() for text in texts], object)

        arguments = [rows.flat_values, rows.row_splits]
        texts = tf.numpy_function(decode, arguments, tf.string, stateful=False)
        texts.set_shape(rows.shape[:1])
        return tf.squeeze(texts, 0) if single else texts

    def compute_output_spec(self, inputs):
        return keras.KerasTensor((*inputs.shape, None), dtype=self.compute_dtype)

    # === Files ===

    def save_assets(self, dir_path):
        with open(os.path.join(dir_path, FILE), "wb") as stream:
            stream.write(self._core.content)

    def load_assets(self, dir_path):
        self.set_tokenizer_json(os.path.join(dir_path, FILE))

    def get_config(self):
        return {**super().get_config(), **{f"{k}_id": id for k, id in self._given_ids.items()}}
