"""`tokenizer.json` files: recorded ones, and small ones with each decoder."""

import json
import pathlib

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from keras_recurrent.tokenizers import BPETokenizer

PATH = pathlib.Path(__file__).parents[1] / "data" / "bpe_tiny"
PATHS = (PATH, PATH / "variants" / "cl100k", PATH / "variants" / "gpt2")
END, PAD, VOCABULARY_SIZE = 982, 980, 987


def tokenizer(**kwargs):
    """The tokenizer of the recorded file in Qwen's layout."""
    ids = {"end_token_id": END, "pad_token_id": PAD}
    return BPETokenizer(PATH / "tokenizer.json", **{**ids, **kwargs})


REMOVED = object()


def changed_file(changes):
    """The bytes of the recorded file with other values: `{(key, index, …): value or REMOVED}`."""
    content = json.loads((PATH / "tokenizer.json").read_text())
    for (*path, last), value in changes.items():
        entry = content
        for key in path:
            entry = entry[key]
        if value is REMOVED:
            del entry[last]
        else:
            entry[last] = value
    return json.dumps(content).encode()


def llama(decoder):
    """A tokenizer with spaces as ▁ and a token for each byte, as in Llama 2."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [*"▁ahpy.é", "▁h", "ha", "▁ha", "py"]
    merges = [("▁", "h"), ("h", "a"), ("▁h", "a"), ("p", "y")]
    vocabulary = {name: id for id, name in enumerate(names)}
    library = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if decoder is not None:
        library.decoder = decoder
    library.add_special_tokens(names[:3])
    return BPETokenizer(library.to_str().encode(), start_token_id=1, end_token_id=2)


DECODERS = {
    "fallback": decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback()),
            *(decoders.Fuse(), decoders.Strip(" ", 1, 0)),
        ]
    ),
    "metaspace": decoders.Metaspace(prepend_scheme="first"),
    "suffix": decoders.BPEDecoder(suffix="y"),
    "none": None,
}
