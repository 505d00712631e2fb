"""Content of a `tokenizer.json` file whose model is BPE."""

import collections
import contextlib
import functools
import json

import tokenizers

from keras_recurrent.tokenizers.checkpoint_files import MIN_PRIVATE, find_tokens, private_name
from keras_recurrent.tokenizers.plain import PlainTokenizer

REPLACEMENT = "\ufffd"
MAX_BYTES = 100_000_000  # the largest published files have about 35 MB
MAX_ID = 2**31 - 1  # of int32
MAX_GROWTH = 1000  # of a text by normalizer or decoder


class BPEFile(PlainTokenizer):
    """Tokenizer of a `tokenizer.json` file, run by the package `tokenizers`.

    Truncation, padding and BPE dropout of the file are switched off.

    Args:
        content: bytes of the file.

    Attributes:
        content: bytes of the file.
        ids: `{token: id}` of all tokens.
        tokens: `{id: token}`, in the order of ids. Ids may be missing.
        special_ids: set of the ids that the file marks as special.
        private_names: `{token: name}` of the special tokens, as in `PlainTokenizer`.

    Raises:
        ValueError: the file is too large, incomplete or inconsistent, or its model is not BPE.
    """

    spells_bytes = True

    def __init__(self, content):
        self.content = content
        parsed = _parse(content)
        self._plain = self._make()
        # The library extracts special tokens of the file from text, unless this is set.
        self._plain.encode_special_tokens = True
        kind = type(self._plain.model).__name__
        if kind != "BPE":
            raise ValueError(
                f"its model is {kind}, and only BPE is supported. Pass `preprocessor=None` to "
                "`from_preset` for a model that takes token ids."
            )
        self.ids = self._plain.get_vocab(with_added_tokens=True)
        self.tokens = dict(sorted((id, token) for token, id in self.ids.items()))
        added = parsed.get("added_tokens") or []
        self._check_ids(added)
        _check_growth(parsed)
        self.special_ids = {token["id"] for token in added if token.get("special")}
        self._added_ids = {token["id"] for token in added}
        self.private_names = {}
        self._private_ids = {}  # {id of a private name: id of its token}
        self._decoder_nodes = _nodes(parsed, "decoder")
        has_fallback = any(node.get("type") == "ByteFallback" for node in self._decoder_nodes)
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        self._bytes = names if has_fallback else {}

    def set_special_tokens(self, **ids):
        """Sets the ids of the start, end and padding token, which become special.

        The start token may be None.

        Raises:
            ValueError: an id is not in the file.
        """
        for name, id in ids.items():
            if id is None and name == "start_token":
                continue
            if id not in self.tokens or isinstance(id, bool):
                some = ", ".join(f"{i} ({self.tokens[i]!r})" for i in sorted(self.special_ids)[:8])
                raise ValueError(
                    f"`{name}_id` must be the id of a token of the file; got {id!r}. Its special "
                    f"tokens are: {some or 'none'}."
                )
        self._mark_special(id for id in ids.values() if id is not None)
        for name, id in ids.items():
            setattr(self, f"{name}_id", id)
            setattr(self, name, self.tokens.get(id))

    def _mark_special(self, ids):
        """Marks tokens as special, such as an end token that the file lists as ordinary.

        A token that plain text is tokenized to, without being an added token, stays ordinary.
        """
        for id in sorted(set(ids) - self.special_ids):
            if id in self._added_ids or self.encode([self.tokens[id]]) != [[id]]:
                self.special_ids.add(id)
                self._plain.add_special_tokens([self.tokens[id]])
        added = self._plain.get_added_tokens_decoder()
        for id in self.special_ids:
            token = self.tokens[id]
            if token in self.private_names or len(token) < MIN_PRIVATE:
                continue
            name = self.private_names[token] = private_name(token)
            # The space around a special token may belong to it.
            space = {side: getattr(added[id], side) for side in ("lstrip", "rstrip")}
            self._plain.add_tokens([tokenizers.AddedToken(name, normalized=False, **space)])
            self._private_ids[self._plain.token_to_id(name)] = id

    @property
    def special_token_ids(self):
        return sorted(self.special_ids)

    def vocabulary_size(self):
        """Returns the largest id plus one."""
        return max(self.tokens) + 1

    def id_to_token(self, id):
        if id not in self.tokens:
            raise ValueError(
                f"`id` must be of a token of the file, from 0 to {max(self.tokens)}. Received: {id}"
            )
        return self.tokens[id]

    def token_to_id(self, token):
        if token not in self.ids:
            raise ValueError(f"`token` must be a token of the file. Received: {token!r}")
        return self.ids[token]

    def encode(self, texts):
        """Returns a list of ids for each string; special tokens are plain text."""
        with _library_errors():
            encodings = self._plain.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_trusted(self, text, positions):
        """Returns the ids of a text with private names, and indices of tokens at positions."""
        encode = self._plain.encode_batch if positions else self._plain.encode_batch_fast
        with _library_errors():
            (encoding,) = encode([text], add_special_tokens=False)
        ids = encoding.ids
        if not self._private_ids.keys().isdisjoint(ids):
            ids = [self._private_ids.get(id, id) for id in ids]
        return ids, find_tokens(encoding.offsets, positions) if positions else []

    def prefix(self):
        """Returns the ids that the file's post-processor adds to an empty text."""
        with _library_errors():
            return self._plain.encode("").ids

    @functools.cached_property
    def joins_texts_of_tokens(self):
        """True if the text of a whole character does not depend on the tokens around it."""
        nodes = [node for node in self._decoder_nodes if "type" in node]
        return bool(nodes) and all(map(_is_local, nodes))

    @property
    def errors(self):
        return "replace" if self.joins_texts_of_tokens else None

    def decode(self, ids):
        """Returns the text of ids. Ids that the file does not have, and invalid bytes, are U+FFFD.

        Of a run of byte tokens that is invalid UTF-8, the library replaces all bytes, and this
        method only the invalid ones: the text of a sequence begins with the text of its beginning.
        """
        tokens = [self.tokens.get(id, REPLACEMENT) for id in ids]
        if self._bytes:
            tokens = self._replace_invalid_bytes(tokens)
        decoder = self._plain.decoder
        with _library_errors():
            return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def _replace_invalid_bytes(self, tokens):
        replaced, run = [], []
        for token in [*tokens, None]:
            if token in self._bytes:
                run.append(token)
                continue
            text = bytes(self._bytes[t] for t in run).decode("utf-8", "replace")
            replaced += [text] if REPLACEMENT in text else run
            run = []
            replaced.append(token)
        return replaced[:-1]

    def _make(self):
        with _library_errors():
            tokenizer = tokenizers.Tokenizer.from_str(self.content.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None
        return tokenizer

    def _check_ids(self, added):
        """Raises an error if ids are too large, shared, or not those that the library assigns."""
        if not self.ids:
            raise ValueError("it has no tokens.")
        token, largest = max(self.ids.items(), key=lambda item: item[1])
        if largest > MAX_ID:
            raise ValueError(f"the id of the token {token!r} is {largest}, above {MAX_ID}.")
        shared = [id for id, n in collections.Counter(self.ids.values()).items() if n > 1]
        if shared:
            tokens = sorted(token for token, id in self.ids.items() if id == shared[0])
            raise ValueError(f"the tokens {tokens[0]!r} and {tokens[1]!r} have the id {shared[0]}.")
        for token in added:
            id = self.ids.get(token["content"])
            if id != token["id"]:
                raise ValueError(
                    f"the added token {token['content']!r} has the id {token['id']}, where the "
                    f"tokenizers library assigns {id}: the id is taken, or ids before it are "
                    "missing."
                )


def read_bpe_file(path):
    """Returns the `BPEFile` of a path."""
    with open(path, "rb") as stream:
        return BPEFile(stream.read(MAX_BYTES + 1))


@contextlib.contextmanager
def _library_errors():
    """Re-raises errors and panics of the library as a ValueError."""
    try:
        yield
    except BaseException as error:
        # A panic, as for a regular expression that backtracks too often, is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizers library reports: {error}") from error


def _parse(content):
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes.")
    try:
        parsed = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON or is cut off: {error}. Fetch it again.") from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise ValueError(
            "it has no 'model', as in a tokenizer.json of the tokenizers library. (KerasHub's "
            "presets have a file of that name with another content.)"
        )
    return parsed


def _nodes(parsed, section):
    """Returns the dictionaries of a section, with those of nested sequences."""
    found, stack = [], [parsed.get(section)]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            found.append(node)
            stack += node.values()
        elif isinstance(node, list):
            stack += node
    return found


def _is_local(node):
    """Returns True if a decoder node changes only single characters or the beginning of a text."""
    if node["type"] == "Replace":
        return len(node["pattern"].get("String", "")) == 1
    if node["type"] == "Strip":
        return not node["stop"]
    return node["type"] in ("Sequence", "ByteLevel", "ByteFallback", "Fuse", "Metaspace")


def _check_growth(parsed):
    """Raises an error if replacements in a row may lengthen a text without bounds."""
    for section in ("normalizer", "decoder"):
        growth = 1
        for node in _nodes(parsed, section):
            if node.get("type") == "Replace":
                growth *= max(1, len(node["content"]))
        if growth > MAX_GROWTH:
            raise ValueError(
                f"replacements of its {section} can lengthen a text {growth} times, and the limit "
                f"is {MAX_GROWTH}."
            )
