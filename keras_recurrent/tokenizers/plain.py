"""Tokenizers without Keras, wrapped by the tokenizers with KerasHub's interface.

The HTTP process of the server uses them alone, and imports neither Keras nor a framework.
"""

from typing import Any

import numpy as np

BYTE_SPECIAL_TOKENS = ("<pad>", "<start>", "<end>")
SPECIAL_TOKENS = ("start_token", "end_token", "pad_token")  # attributes
FIRST_BYTE = len(BYTE_SPECIAL_TOKENS)


class PlainTokenizer:
    """Tokenizer of lists of strings, with those methods of KerasHub's that need no framework.

    Subclasses define `encode`, `encode_trusted`, `decode`, `id_to_token`, `token_to_id` and
    `vocabulary_size`.

    Attributes:
        start_token, end_token, pad_token: strings, or None.
        start_token_id, end_token_id, pad_token_id: integers, or None.
        special_tokens, special_token_ids: lists. Special tokens are not shown in generated text.
        template_tokens: strings, special tokens that trusted texts may contain.
        private_names: `{token: name}` of special tokens whose names `encode_trusted` takes.
        errors: string, the error handler of the codec that converts the bytes of all tokens to
            their text. None: the text of a token may depend on other tokens.
        spells_bytes: boolean, True if tokens of incomplete characters are spelled as in byte-level
            BPE.
    """

    encode: Any
    decode: Any
    id_to_token: Any
    special_token_ids: Any
    private_names: Any = {}
    spells_bytes = False

    @property
    def _core(self):
        return self

    @property
    def special_tokens(self):
        return list(map(self.id_to_token, self.special_token_ids))

    template_tokens: Any = special_tokens

    def __call__(self, texts):
        """Returns a list of ids for each string."""
        return self.encode(texts)

    tokenize = __call__

    def detokenize(self, rows):
        """Returns the text of each list of ids."""
        return [self.decode(ids) for ids in rows]

    def bytes_of(self, id):
        """Returns the bytes of a token if they follow from the id, else None."""


class PlainByteTokenizer(PlainTokenizer):
    """UTF-8 bytes, after the special tokens.

    errors: string, as in `ByteTokenizer`.
    """

    pad_token, start_token, end_token = BYTE_SPECIAL_TOKENS
    pad_token_id, start_token_id, end_token_id = range(FIRST_BYTE)

    def __init__(self, errors="replace"):
        self.errors = errors

    @property
    def special_token_ids(self):
        return list(range(FIRST_BYTE))

    def vocabulary_size(self):
        return FIRST_BYTE + 256

    def id_to_token(self, id):
        if not 0 <= id < self.vocabulary_size():
            raise ValueError(f"`id` must be from 0 to {self.vocabulary_size() - 1}. Received: {id}")
        return BYTE_SPECIAL_TOKENS[id] if id < FIRST_BYTE else chr(id - FIRST_BYTE)

    def token_to_id(self, token):
        if token in BYTE_SPECIAL_TOKENS:
            return BYTE_SPECIAL_TOKENS.index(token)
        if len(token) != 1 or ord(token) > 255:
            raise ValueError(
                "`token` must be a special token or one character with a code from 0 to 255, for "
                f"the byte of that code. Received: {token!r}"
            )
        return FIRST_BYTE + ord(token)

    def encode(self, texts):
        return [self.encode_trusted(text, ())[0] for text in texts]

    def encode_trusted(self, text, positions):
        codes = np.frombuffer(text.encode("utf-8"), "uint8").astype("int32")
        indices = [len(text[:at].encode("utf-8")) for at in positions]
        return (codes + FIRST_BYTE).tolist(), indices

    def decode(self, ids):
        ids = np.array(ids, "int64")
        # Unknown ids become byte 255, which is never valid, so `errors` handles them.
        codes = np.minimum(ids[ids >= FIRST_BYTE] - FIRST_BYTE, 255)
        return codes.astype("uint8").tobytes().decode("utf-8", errors=self.errors)

    def bytes_of(self, id):
        return bytes([min(id - FIRST_BYTE, 255)])
