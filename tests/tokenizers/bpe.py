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


def changed(change):
    """The bytes of the recorded file after `change(content)`."""
    content = json.loads((PATH / "tokenizer.json").read_text())
    change(content)
    return json.dumps(content).encode()


def llama(decoder):
    """A file with spaces as ▁ and a token for each byte, as Llama 2 has it."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [*"▁ahpy.é", "▁h", "ha", "▁ha", "py"]
    merges = [("▁", "h"), ("h", "a"), ("▁h", "a"), ("p", "y")]
    vocabulary = {name: id for id, name in enumerate(names)}
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens(names[:3])
    return BPETokenizer(made.to_str().encode(), start_token_id=1, end_token_id=2)


DECODERS = {
    "fallback": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "metaspace": decoders.Metaspace(prepend_scheme="first"),
    "suffix": decoders.BPEDecoder(suffix="y"),
    "none": None,
}
