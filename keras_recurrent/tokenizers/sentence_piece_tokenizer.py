"""SentencePiece tokenizer with special tokens given by id."""

import functools
import os
import re

import keras
import keras_hub
import sentencepiece

from keras_recurrent import compat
from keras_recurrent.checks.arguments import is_integer
from keras_recurrent.tokenizers.checkpoint_files import (
    CheckpointTokenizer,
    describe_errors,
    find_tokens,
    private_name,
)

SPECIAL_TOKENS = ("start_token", "end_token", "pad_token")
# User-defined symbols of this form are special in chat prompts; others may be words or white space.
SYMBOL = re.compile(r"<[^<>\s'\"{}]+>|\[[^\[\]\s'\"{}]+\]")


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
        self._added = {}  # `{id: token}` of those that are not in the file
        self._given_start_token_id = start_token_id
        self._given_end_token_id = end_token_id
        self._given_pad_token_id = pad_token_id
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
        for name in ("_template_tokens", "_private_file"):
            self.__dict__.pop(name, None)
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

    @functools.cached_property
    def _private_file(self):
        """The file with private names for the symbols, and `{symbol: private name}`."""
        from sentencepiece import sentencepiece_model_pb2 as messages

        model = messages.ModelProto.FromString(self.proto)  # type: ignore[attr-defined]
        names = {}
        for piece in model.pieces:
            if piece.type == piece.USER_DEFINED and SYMBOL.fullmatch(piece.piece):
                name = names[piece.piece] = private_name(piece.piece)
                piece.piece = name
        if not names:
            return self._sentence_piece_spm, names
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString()), names

    @property
    def _private_names(self):
        return self._private_file[1]

    @functools.cached_property
    def _template_tokens(self):
        """Set of the special tokens, the control tokens of the file, and the symbols."""
        self._check_vocabulary()
        file = self._sentence_piece_spm
        control = (id for id in range(super().vocabulary_size()) if file.IsControl(id))
        return {*self.special_tokens, *map(self.id_to_token, control), *self._private_names}

    def _encode(self, text, positions):
        file, _ = self._private_file
        if not positions:
            return file.EncodeAsIds(text), []
        found = file.EncodeAsOffsetMapping(text)
        return found["ids"], find_tokens(found["offsets"], positions)

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
