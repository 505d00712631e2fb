"""SentencePiece tokenizer with special tokens given by id."""

import os

import keras
import keras_hub

from keras_recurrent import compat
from keras_recurrent.atomic_files import AtomicPreset
from keras_recurrent.checks.arguments import is_integer
from keras_recurrent.tokenizers.checkpoint_files import (
    describe_errors,
    load_from_preset,
    tokenize_around,
)

SPECIAL_TOKENS = ("start_token", "end_token", "pad_token")


@keras.saving.register_keras_serializable(package="keras_recurrent")
class SentencePieceTokenizer(AtomicPreset, keras_hub.tokenizers.SentencePieceTokenizer):
    """SentencePiece tokenizer of a checkpoint, for any family of models.

    KerasHub's tokenizers identify special tokens by name, with one class per family. This class
    identifies them by id, as `config.json` of a checkpoint and the SentencePiece file do.

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
        self._added = {}  # `{id: token}` of those that are not in the file
        self._given_start_token_id = start_token_id
        self._given_end_token_id = end_token_id
        self._given_pad_token_id = pad_token_id
        self._special_token_attrs = list(SPECIAL_TOKENS)
        super().__init__(proto=proto, dtype=dtype, **kwargs)
        # There are no weights to build, but `quantize` of a model rejects layers not built.
        self.built = True

    @classmethod
    def from_preset(cls, preset, **kwargs):
        """Loads the tokenizer of a checkpoint or of a directory of `save_to_preset`.

        Raises:
            ValueError: the preset has another tokenizer, or none.
        """
        return load_from_preset(cls, preset, "proto", **kwargs)

    def load_assets(self, dir_path):
        (name,) = self.file_assets
        path = os.path.join(dir_path, name)
        with open(path, "rb") as file:
            proto = file.read()
        with describe_errors(path):
            self.set_proto(proto)  # given a path, KerasHub leaves the file open

    def _update_special_token_ids(self):
        # KerasHub calls this after the file is loaded.
        self._special_ids = None  # `{special token: id}`, found when it is first needed
        file = self._sentence_piece_spm
        size = super().vocabulary_size()
        self._added = {
            id: token
            for token, id in self.added_tokens.items()
            if id >= size or file.IdToPiece(id) != token
        }
        file_ids = {
            "start_token": file.bos_id(),
            "end_token": file.eos_id(),
            "pad_token": file.pad_id() if file.pad_id() >= 0 else file.eos_id(),
        }
        for name in SPECIAL_TOKENS:
            given = getattr(self, f"_given_{name}_id")
            id = file_ids[name] if given is None else given
            if not 0 <= id < size and id not in self._added:
                raise ValueError(
                    f"`{name}_id` must be from 0 to {size - 1}, the tokens of the SentencePiece "
                    f"file, or an id in `added_tokens`; got {given}, and the file has "
                    f"{file_ids[name]}."
                )
            setattr(self, f"{name}_id", id)
            setattr(self, name, self.id_to_token(id))

    # === Vocabulary ===

    @property
    def special_tokens(self):
        """List of the start, end and padding token and the added tokens."""
        return list({*super().special_tokens, *self._added.values()})

    @property
    def special_token_ids(self):
        """List of the ids of `special_tokens`. They are removed from generated text."""
        return list({*super().special_token_ids, *self._added})

    def vocabulary_size(self):
        """Returns the largest id plus one."""
        return max(super().vocabulary_size(), *(id + 1 for id in self._added), 0)

    def get_vocabulary(self):
        """Returns a list of the tokens, by id. Ids without a token have None."""
        tokens = super().get_vocabulary()
        tokens += [None] * (self.vocabulary_size() - len(tokens))
        for id, token in self._added.items():
            tokens[id] = token
        return tokens

    def id_to_token(self, id):
        """Returns the token of an id."""
        if id in self._added:
            return self._added[id]
        size = super().vocabulary_size()
        if not 0 <= id < size:
            raise ValueError(
                f"`id` must be from 0 to {size - 1}, or in `added_tokens`. Received: {id}"
            )
        return super().id_to_token(id)

    def token_to_id(self, token):
        """Returns the id of a token, or that of the unknown token."""
        ids = {added: id for id, added in self._added.items()}
        return ids[token] if token in ids else super().token_to_id(token)

    # === Text to tokens ===

    def tokenize_with_special_tokens(self, text):
        """Tokenizes a trusted text, such as a rendered chat template, with its special tokens.

        Special tokens are the start, end and padding token, the control tokens of the file and the
        added tokens. The file's user-defined tokens, such as Gemma's `<start_of_turn>`, are single
        tokens in any text.

        Args:
            text: a string, or a list of strings.

        Returns:
            A list of ids, or a list of lists.
        """
        self._check_vocabulary()
        if self._special_ids is None:  # the file has a quarter of a million tokens
            file = self._sentence_piece_spm
            ids = {id for id in range(super().vocabulary_size()) if file.IsControl(id)}
            ids |= set(self.special_token_ids)
            self._special_ids = {self.id_to_token(id): id for id in ids}
        return tokenize_around(self, text, self._special_ids)

    # === Tokens to text ===

    # The vocabulary of a model may be larger than the file's. It may generate such ids: unknown.

    def _canonicalize_detokenize_spm_inputs(self, inputs):
        rows, batched = super()._canonicalize_detokenize_spm_inputs(inputs)
        size, unknown = super().vocabulary_size(), self._unk_token_id
        rows = [[id for id in row if id not in self._added] for row in rows]
        return [[id if id < size else unknown for id in row] for row in rows], batched

    @compat.preprocessing_function
    def _detokenize_tf(self, inputs):
        import tensorflow as tf

        size = super().vocabulary_size()

        def is_not_added(ids):
            return tf.reduce_all(ids[..., None] != tf.constant(list(self._added), ids.dtype), -1)

        def known(ids):
            return tf.where(ids < size, ids, self._unk_token_id)

        if self._added:
            not_added = tf.ragged.map_flat_values(is_not_added, inputs)
            inputs = tf.ragged.boolean_mask(inputs, not_added)
        return super()._detokenize_tf(tf.ragged.map_flat_values(known, inputs))

    def get_config(self):
        given = {f"{name}_id": getattr(self, f"_given_{name}_id") for name in SPECIAL_TOKENS}
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
