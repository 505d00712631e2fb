"""Text of a token stream: chunks that together are the whole text, and end at whole characters."""

import codecs
import functools

import numpy as np
import pytest

from keras_recurrent.models import GriffinCausalLMPreprocessor
from keras_recurrent.tokenizers import ByteTokenizer, SentencePieceTokenizer, detokenizer
from keras_recurrent.tokenizers.detokenizer import IncrementalDetokenizer, TokenBytes
from tests.generation.tokens import pad
from tests.models.tiny import tiny_causal_lm
from tests.tokenizers import bpe
from tests.tokenizers.sentence_piece import train

pytestmark = pytest.mark.once
BYTE_FALLBACK = {"byte_fallback": True, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
TOKENIZERS = {
    "bytes": ByteTokenizer,
    "bytes, ignore": lambda: ByteTokenizer(errors="ignore"),
    "sentence_piece": lambda: SentencePieceTokenizer(train(300, **BYTE_FALLBACK)),
    "bpe": bpe.tokenizer,
    **{name: functools.partial(bpe.llama, decoder) for name, decoder in bpe.DECODERS.items()},
}
# Tokens besides special ones and bytes of characters: letters, spaces, invalid bytes, unknown ids.
OTHER_TOKENS = {
    "bytes": [3 + byte for byte in (0x61, 0xBF, 0xFF)],
    "bytes, ignore": [3 + byte for byte in (0x61, 0xBF, 0xFF)],
    "bpe": [0, 64, 220, 378, 983, 990, 5000],
}


def detokenize_chunks(known, tokens, last_token=1):
    """Returns the text that each token completes, and the rest; `known` is a `TokenBytes`."""
    detokenizer = IncrementalDetokenizer(known, last_token)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.end()]


def unknown_bytes(preprocessor):
    """Returns `TokenBytes` as of a tokenizer whose texts of tokens are unknown."""
    unknown = TokenBytes(preprocessor)
    unknown.errors = None
    return unknown


def make_preprocessor(tokenizer, **options):
    return GriffinCausalLMPreprocessor(tokenizer, sequence_length=64, **options)


def detokenize(preprocessor, tokens):
    """Returns the text of all tokens."""
    return preprocessor.generate_postprocess(pad([tokens]))[0]


def text_model(**options):
    """Returns a model of bytes, compiled for greedy sampling."""
    sizes = {"vocabulary_size": 259, "num_layers": 1, "block_types": ("recurrent",)}
    model = tiny_causal_lm(preprocessor=make_preprocessor(ByteTokenizer(), **options), **sizes)
    model.compile(sampler="greedy")
    return model


@pytest.mark.parametrize("name", ["bytes", "bytes, ignore", "bpe", *bpe.DECODERS])
def test_chunks_of_random_tokens_match_the_whole_text(name):
    """Invalid bytes, unknown ids or leading spaces change the text around them."""
    rng, tokenizer, text = np.random.default_rng(0), TOKENIZERS[name](), "é€😀"
    byte_ids = tokenizer(text).tolist() if name == "bpe" else [3 + b for b in text.encode()]
    others = OTHER_TOKENS.get(name) or [*range(259, tokenizer.vocabulary_size()), 400]
    alphabet = [*tokenizer.special_token_ids, *byte_ids, *others]
    preprocessor, end = make_preprocessor(tokenizer), tokenizer.end_token_id
    known, unknown = TokenBytes(preprocessor), unknown_bytes(preprocessor)
    for number in range(300 if name.startswith("bytes") else 100):
        tokens = rng.choice(alphabet, size=16)
        found = detokenize_chunks(known if number % 2 else unknown, tokens, end)
        assert "".join(found) == detokenize(preprocessor, tokens)
    assert bool(known) == (name not in ("suffix", "none"))
    if name not in ("metaspace", "suffix", "none"):
        chunks = detokenize_chunks(unknown, byte_ids, end)
        assert [chunk for chunk in chunks if chunk] == [*text]


@pytest.mark.parametrize("errors", ["replace", "ignore"])
def test_chunks_withhold_only_bytes_that_may_become_a_character(errors):
    """Text is withheld for more than a character."""
    rng, preprocessor = np.random.default_rng(0), make_preprocessor(ByteTokenizer(errors=errors))
    data = bytes(rng.choice([0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC], size=200).tolist())
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    found = expected = ""
    chunks = detokenize_chunks(unknown_bytes(preprocessor), [3 + byte for byte in data])
    for byte, chunk in zip(data, chunks, strict=False):
        found, expected = found + chunk, expected + decoder.decode(bytes([byte]))
        assert expected.startswith(found)
        assert len(expected) - len(found) <= 3


def test_strict_tokenizer_raises_only_for_invalid_bytes():
    """A character after one of several bytes is an error, or an incomplete one is not."""
    preprocessor = make_preprocessor(ByteTokenizer(errors="strict"))
    for known in (unknown_bytes(preprocessor), TokenBytes(preprocessor)):
        for whole in ("é!", "😀é€€a"):
            tokens = preprocessor.tokenizer(whole)
            assert "".join(detokenize_chunks(known, tokens)) == whole
        with pytest.raises(UnicodeDecodeError):
            detokenize_chunks(known, [3 + 0xE2])


def test_chunks_of_sentence_piece_keep_spaces():
    """A chunk loses the space before its first word."""
    tokenizer = SentencePieceTokenizer(train(), pad_token_id=0)
    preprocessor = make_preprocessor(tokenizer)
    tokens, known = tokenizer("all happy families are alike"), TokenBytes(preprocessor)
    for cut in [*range(1, len(tokens))] * 2:
        found = detokenize_chunks(known, tokens[cut:], tokens[cut - 1])
        begin, whole = (detokenize(preprocessor, ids) for ids in (tokens[:cut], tokens))
        assert begin + "".join(found) == whole
    assert known
    # The space after a word is dropped if no word follows.
    suffixed = SentencePieceTokenizer(train(treat_whitespace_as_suffix=True), pad_token_id=0)
    assert TokenBytes(make_preprocessor(suffixed)).errors is None


@pytest.mark.parametrize("errors", ["replace", "ignore"])
def test_detokenizer_converts_a_limited_number_of_tokens(errors, monkeypatch):
    """A token takes longer the more invalid bytes were generated before it."""
    preprocessor = make_preprocessor(ByteTokenizer(errors=errors))
    sizes, convert = [], detokenizer._detokenize
    monkeypatch.setattr(
        detokenizer, "_detokenize", lambda p, ids: sizes.append(len(ids)) or convert(p, ids)
    )
    tokens = [3 + byte for byte in b"\x80\xe2" * 200 + "a€".encode()]
    for known in (unknown_bytes(preprocessor), TokenBytes(preprocessor)):
        found = detokenize_chunks(known, tokens)
        assert "".join(found) == detokenize(preprocessor, tokens)
        assert found[-4:] == ["", "", "€", ""]
    assert max(sizes) <= detokenizer.MAX_TOKENS + 1


def test_text_after_a_cache_has_no_start_token():
    model = text_model()
    _, cache = model.generate("All", max_length=12, stop_token_ids=None, return_cache=True)
    assert cache.num_tokens[0] == 12
    options = {"max_length": 5, "cache": cache, "stop_token_ids": None}
    more, after = model.generate(" ", **options, return_cache=True)
    assert more.startswith(" ")
    assert after.num_tokens[0] == 17
    assert " " + model.generate(" ", **options, strip_prompt=True) == more
    assert model.generate([" "], **options) == [more]
    cache = model.prefill(np.array(["a", "bc"]), max_length=8)
    assert cache.num_tokens.tolist() == [2, 3]


@pytest.mark.parametrize("add_start_token", [True, False])
def test_start_token_is_added_if_the_preprocessor_adds_it(add_start_token):
    """`generate`, `stream` and `prefill` count another number of tokens for one prompt."""
    model = text_model(add_start_token=add_start_token)
    options = {"max_length": 9, "stop_token_ids": None}
    whole = model.generate("abc", **options)
    assert model.generate("abc", **options, return_cache=True)[0] == whole
    chunks = list(model.stream("abc", **options))
    assert all(chunks)
    assert "abc" + "".join(chunks) == whole
    assert model.prefill("abc").num_tokens.tolist() == [3 + add_start_token]
    assert model.generate("abc", max_length=3 + add_start_token) == "abc"
