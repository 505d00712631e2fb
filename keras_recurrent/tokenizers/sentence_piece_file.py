"""SentencePiece file with special tokens given by id."""

import codecs
import functools
import re

import sentencepiece

from keras_recurrent.tokenizers.checkpoint_files import find_tokens, private_name
from keras_recurrent.tokenizers.plain import SPECIAL_TOKENS, PlainTokenizer

# User-defined symbols of this form are special in chat prompts; others may be words or white space.
SYMBOL = re.compile(r"<[^<>\s'\"{}]+>|\[[^\[\]\s'\"{}]+\]")
SPACE = "\u2581"  # in tokens
EACH_BYTE = "keras_recurrent_replace_each_byte"


def _replace_each_byte(error):
    """Error handler of a codec, which replaces bytes as SentencePiece does."""
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


def decoding_errors(tokens):
    """Returns `PlainTokenizer.errors` of a file with these tokens."""
    # A token may end in a space, which is dropped after the last token: its text depends on what
    # follows.
    drops_spaces = any(t.endswith(SPACE) and t.strip(SPACE) for t in filter(None, tokens))
    return None if drops_spaces else EACH_BYTE


class SentencePieceFile(PlainTokenizer):
    """Tokenizer of a SentencePiece file.

    Args:
        proto: bytes of the file.
        given_ids: a dictionary of `SPECIAL_TOKENS` and their ids. None: the ids of the file.
        added_tokens: as in `SentencePieceTokenizer`.

    Attributes:
        size: integer, number of tokens of the file.
        added: `{id: token}` of the tokens that are not in the file.

    Raises:
        ValueError: an id is neither in the file nor of an added token.
    """

    def __init__(self, proto, given_ids, added_tokens):
        self._arguments = proto, given_ids, added_tokens
        self._file = file = sentencepiece.SentencePieceProcessor(model_proto=proto)
        self.size = size = file.vocab_size()
        self.added = {
            id: token
            for token, id in added_tokens.items()
            if id >= size or file.IdToPiece(id) != token
        }
        self._added_ids = {token: id for id, token in self.added.items()}
        file_ids = {
            "start_token": file.bos_id(),
            "end_token": file.eos_id(),
            "pad_token": file.pad_id() if file.pad_id() >= 0 else file.eos_id(),
        }
        for name in SPECIAL_TOKENS:
            given = given_ids[name]
            id = file_ids[name] if given is None else given
            if not 0 <= id < size and id not in self.added:
                raise ValueError(
                    f"`{name}_id` must be from 0 to {size - 1}, the tokens of the SentencePiece "
                    f"file, or an id in `added_tokens`; got {given}, and the file has "
                    f"{file_ids[name]}."
                )
            setattr(self, f"{name}_id", id)
            setattr(self, name, self.id_to_token(id))

    def __reduce__(self):
        return SentencePieceFile, self._arguments

    @property
    def special_token_ids(self):
        return list({*(getattr(self, f"{name}_id") for name in SPECIAL_TOKENS), *self.added})

    def vocabulary_size(self):
        return max(self.size, *(id + 1 for id in self.added), 0)

    def id_to_token(self, id):
        if id in self.added:
            return self.added[id]
        if not 0 <= id < self.size:
            raise ValueError(
                f"`id` must be from 0 to {self.size - 1}, or in `added_tokens`. Received: {id}"
            )
        return self._file.IdToPiece(id)

    def token_to_id(self, token):
        """Returns the id of a token, or that of the unknown token."""
        return self._added_ids.get(token, self._file.PieceToId(token))

    @functools.cached_property
    def errors(self):
        return decoding_errors(map(self.id_to_token, range(self.size)))

    @functools.cached_property
    def _private_file(self):
        """The file with private names for the symbols, and `{symbol: private name}`."""
        from sentencepiece import sentencepiece_model_pb2 as messages

        model = messages.ModelProto.FromString(self._arguments[0])  # type: ignore[attr-defined]
        names = {}
        for piece in model.pieces:
            if piece.type == piece.USER_DEFINED and SYMBOL.fullmatch(piece.piece):
                name = names[piece.piece] = private_name(piece.piece)
                piece.piece = name
        if not names:
            return self._file, names
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString()), names

    @functools.cached_property
    def private_names(self):
        return self._private_file[1]

    @functools.cached_property
    def template_tokens(self):
        """Set of the special tokens, the control tokens of the file, and the symbols."""
        control = filter(self._file.IsControl, range(self.size))
        return {*self.special_tokens, *map(self.id_to_token, control), *self.private_names}

    def encode(self, texts):
        return self._file.EncodeAsIds(texts)

    def encode_trusted(self, text, positions):
        file, _ = self._private_file
        if not positions:
            return file.EncodeAsIds(text), []
        found = file.EncodeAsOffsetMapping(text)
        return found["ids"], find_tokens(found["offsets"], positions)

    def known_ids(self, ids):
        """Returns ids without added tokens, and the unknown token for those outside the file.

        The vocabulary of a model may be larger than the file's, and it may generate such ids.
        """
        unknown = self._file.unk_id()
        return [id if id < self.size else unknown for id in ids if id not in self.added]

    def decode(self, ids):
        return self._file.DecodeIds(self.known_ids(map(int, ids)))
