"""SentencePiece tokenizer with special tokens given by id."""

import os

import keras
import keras_hub

from keras_recurrent import compat
from keras_recurrent.checks.arguments import is_integer
from keras_recurrent.tokenizers.checkpoint_files import CheckpointTokenizer, describe_errors
from keras_recurrent.tokenizers.plain import SPECIAL_TOKENS
from keras_recurrent.tokenizers.sentence_piece_file import SentencePieceFile


@keras.saving.register_keras_serializable(package="keras_recurrent")
class SentencePieceTokenizer(CheckpointTokenizer, keras_hub.tokenizers.SentencePieceTokenizer):
    """SentencePiece tokenizer of a checkpoint, for any family of models.

    KerasHub's tokenizers identify special tokens by name, with one class per family. This class
    identifies them by id, as `config.json` of a checkpoint and the SentencePiece file do.

    Special tokens of `tokenize_with_special_tokens` are the start, end and padding token, the
    control tokens of the file and the added tokens, and user-defined tokens in brackets, such as
    Gemma's `<start_of_turn>`. User-defined tokens are single tokens in other texts, too, except the
    messages of chat prompts.

    Args:
        proto: path or bytes of a SentencePiece file. None: it is loaded later.
        start_token_id, end_token_id, pad_token_id: integers. None: the ids of the file; a file
            without a padding token pads with its end token.
        added_tokens: a dictionary `{token: id}` of special tokens that the file does not have, such
            as `{"<|im_end|>": 73440}`. Each replaces a token of the file that has its id. None:
            no tokens.
        dtype: integer dtype of the tokens. Defaults to `"int32"`.
        **kwargs: as in `keras_hub.tokenizers.SentencePieceTokenizer`.

    Call arguments:
        inputs: a string, or a list, array or tensor of strings.

    Returns:
        A list of tokens for every string, an array for a single string, a ragged tensor inside
        `tf.data`. The preprocessor adds start and end tokens. `detokenize` omits added tokens.

    Raises:
        ValueError: the file has no start or end token and none is given, an id is neither in it nor
            of an added token, or `added_tokens` has other keys than strings, other values than
            integers of at least 0, or an id twice.

    Example:

    >>> import io, sentencepiece
    >>> from keras_recurrent.tokenizers import SentencePieceTokenizer
    >>> file = io.BytesIO()
    >>> sentencepiece.SentencePieceTrainer.train(
    ...     sentence_iterator=iter(["all happy families are alike"]), model_writer=file,
    ...     vocab_size=30, hard_vocab_limit=False, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
    ...     minloglevel=2,
    ... )
    >>> tokenizer = SentencePieceTokenizer(file.getvalue())
    >>> tokenizer.detokenize(tokenizer(["happy families"]))
    ['happy families']
    >>> tokenizer.start_token_id, tokenizer.end_token_id, tokenizer.pad_token_id
    (2, 1, 0)
    """

    file_argument = "proto"
    file_description = "SentencePiece file"

    def __init__(
        self,
        proto=None,
        *,
        start_token_id=None,
        end_token_id=None,
        pad_token_id=None,
        added_tokens=None,
        dtype="int32",
        **kwargs,
    ):
        self.added_tokens = _check_added_tokens(added_tokens)
        ids = start_token_id, end_token_id, pad_token_id
        self._given_ids = dict(zip(SPECIAL_TOKENS, ids, strict=True))
        self._special_token_attrs = list(SPECIAL_TOKENS)
        super().__init__(proto=proto, dtype=dtype, **kwargs)
        # There are no weights to build, but `quantize` of a model rejects layers not built.
        self.built = True

    def load_assets(self, dir_path):
        (name,) = self.file_assets
        path = os.path.join(dir_path, name)
        with open(path, "rb") as file:
            proto = file.read()
        with describe_errors(path):
            self.set_proto(proto)  # given a path, KerasHub leaves the file open

    def _update_special_token_ids(self):
        # KerasHub calls this after the file is loaded.
        self._file = SentencePieceFile(self.proto, dict(self._given_ids), dict(self.added_tokens))
        self._copy_special_tokens(self._file)

    @property
    def _core(self):
        self._check_vocabulary()
        return self._file

    # === Vocabulary ===

    def get_vocabulary(self):
        """Returns a list of the tokens, by id. Ids without a token have None."""
        tokens = super().get_vocabulary()
        tokens += [None] * (self.vocabulary_size() - len(tokens))
        for id, token in self._core.added.items():
            tokens[id] = token
        return tokens

    # === Tokens to text ===

    def _canonicalize_detokenize_spm_inputs(self, inputs):
        rows, batched = super()._canonicalize_detokenize_spm_inputs(inputs)
        return [self._core.known_ids(row) for row in rows], batched

    @compat.preprocessing_function
    def _detokenize_tf(self, inputs):
        import tensorflow as tf

        size, added = self._core.size, list(self._core.added)

        def is_not_added(ids):
            return tf.reduce_all(ids[..., None] != tf.constant(added, ids.dtype), -1)

        def known(ids):
            return tf.where(ids < size, ids, self._unk_token_id)

        if added:
            not_added = tf.ragged.map_flat_values(is_not_added, inputs)
            inputs = tf.ragged.boolean_mask(inputs, not_added)
        return super()._detokenize_tf(tf.ragged.map_flat_values(known, inputs))

    def get_config(self):
        given = {f"{name}_id": id for name, id in self._given_ids.items()}
        return {**super().get_config(), **given, "added_tokens": dict(self.added_tokens)}


def _check_added_tokens(added_tokens):
    """Returns `added_tokens` as a dictionary."""
    tokens = {} if added_tokens is None else added_tokens
    valid = isinstance(tokens, dict) and all(
        isinstance(token, str) and token and is_integer(id) and id >= 0
        for token, id in tokens.items()
    )
    if not valid or len(set(tokens.values())) < len(tokens):
        raise ValueError(
            "`added_tokens` must be a dictionary of tokens, strings, with their ids, distinct "
            f"integers of at least 0; got {added_tokens!r}."
        )
    return {token: int(id) for token, id in tokens.items()}
