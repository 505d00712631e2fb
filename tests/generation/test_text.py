"""Text as it is written: pieces that together are the text, whole characters alone."""

import codecs

import numpy as np
import pytest

from keras_recurrent.generation import text
from keras_recurrent.generation.text import IncrementalDetokenizer, TokenBytes
from keras_recurrent.models import GriffinCausalLMPreprocessor
from keras_recurrent.tokenizers import ByteTokenizer, SentencePieceTokenizer
from tests.models.tiny import tiny_causal_lm
from tests.tokenizers import bpe
from tests.tokenizers.sentence_piece import train

pytestmark = pytest.mark.once
BYTE_FALLBACK = {"byte_fallback": True, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
TOKENIZERS = {
    "bytes": ByteTokenizer,
    "sentence_piece": lambda: SentencePieceTokenizer(train(300, **BYTE_FALLBACK)),
    "bpe": bpe.tokenizer,
    "suffix": lambda: bpe.llama(bpe.DECODERS["suffix"]),
    "fallback": lambda: bpe.llama(bpe.DECODERS["fallback"]),
}


def pieces_of(preprocessor, tokens, last_token, known=None):
    detokenizer = IncrementalDetokenizer(preprocessor, last_token, known)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.end()]


def preprocessor_of(tokenizer, **options):
    return GriffinCausalLMPreprocessor(tokenizer, sequence_length=64, **options)


def text_model(**options):
    """A model of bytes, compiled for greedy sampling."""
    sizes = {"vocabulary_size": 259, "num_layers": 1, "block_types": ("recurrent",)}
    model = tiny_causal_lm(preprocessor=preprocessor_of(ByteTokenizer(), **options), **sizes)
    model.compile(sampler="greedy")
    return model


def text_of(preprocessor, tokens):
    rows = {"token_ids": np.array([tokens], "int32")}
    rows["padding_mask"] = np.ones_like(rows["token_ids"], bool)
    return preprocessor.generate_postprocess(rows)[0]


@pytest.mark.parametrize("errors", ["replace", "ignore"])
def test_any_bytes(errors):
    """What is no text comes as the whole row would give it, and soon."""
    rng = np.random.default_rng(0)
    preprocessor = preprocessor_of(ByteTokenizer(errors=errors))
    alphabet = [0, 1, 2, *(3 + b for b in (0x61, 0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0xFF))]
    known = TokenBytes(preprocessor)
    for number in range(300):
        tokens = rng.choice(alphabet, size=12)
        found = pieces_of(preprocessor, tokens, 1, known if number % 2 else None)
        assert "".join(found) == text_of(preprocessor, tokens)
    assert known[3 + ord("a")] == b"a"
    # Python's own decoder holds back what may become a character, and nothing else.
    data = bytes(rng.choice([0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC], size=200).tolist())
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    out = pieces_of(preprocessor, [3 + b for b in data], 1)
    told = expected = ""
    for byte, piece in zip(data, out, strict=False):
        told, expected = told + piece, expected + decoder.decode(bytes([byte]))
        assert expected.startswith(told)
        assert len(expected) - len(told) <= 3


def test_bytes_that_must_be_text():
    """A character after one of several bytes is an error, or an incomplete one is not."""
    preprocessor = preprocessor_of(ByteTokenizer(errors="strict"))
    for known in (None, TokenBytes(preprocessor)):
        for whole in ("é!", "😀é€€a"):
            assert (
                "".join(pieces_of(preprocessor, preprocessor.tokenizer(whole), 1, known)) == whole
            )
        with pytest.raises(UnicodeDecodeError):
            pieces_of(preprocessor, [3 + 0xE2], 1, known)


def test_spaces_of_sentence_piece():
    tokenizer = SentencePieceTokenizer(train(), pad_token_id=0)
    preprocessor = preprocessor_of(tokenizer)
    tokens = tokenizer("all happy families are alike")
    known = TokenBytes(preprocessor)
    for cut in [*range(1, len(tokens))] * 2:
        found = pieces_of(preprocessor, tokens[cut:], tokens[cut - 1], known)
        assert text_of(preprocessor, tokens[:cut]) + "".join(found) == text_of(preprocessor, tokens)
    assert known
    # The space after a word is dropped if no word follows.
    suffixed = SentencePieceTokenizer(train(treat_whitespace_as_suffix=True), pad_token_id=0)
    assert TokenBytes(preprocessor_of(suffixed)).errors is None


@pytest.mark.parametrize("name", ["bytes", "sentence_piece", "bpe", "fallback"])
def test_token_bytes_of_incomplete_characters_are_those_of_the_vocabulary(name):
    """The log probabilities of a part of a character have no bytes, or wrong ones."""
    tokenizer, characters = TOKENIZERS[name](), "é€😀"
    known = TokenBytes(preprocessor_of(tokenizer))
    assert b"".join(known[int(t)] for t in tokenizer(characters)).strip() == characters.encode()


@pytest.mark.parametrize("errors", ["replace", "ignore"])
def test_bytes_without_text_are_not_converted_again(errors, monkeypatch):
    """A token takes longer the more invalid bytes were generated before it."""
    preprocessor = preprocessor_of(ByteTokenizer(errors=errors))
    sizes, convert = [], text._detokenize
    monkeypatch.setattr(
        text, "_detokenize", lambda p, ids: sizes.append(len(ids)) or convert(p, ids)
    )
    tokens = [3 + byte for byte in b"\x80\xe2" * 200 + "a€".encode()]
    for known in (None, TokenBytes(preprocessor)):
        found = pieces_of(preprocessor, tokens, 1, known)
        assert "".join(found) == text_of(preprocessor, tokens)
        assert found[-4:] == ["", "", "€", ""]
    assert max(sizes) <= text.MAX_TOKENS + 1


def test_text_that_continues_a_cache_has_no_start_token():
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


@pytest.mark.parametrize("add", [True, False])
def test_a_start_token_is_added_where_the_preprocessor_says_so(add):
    model = text_model(add_start_token=add)
    options = {"max_length": 9, "stop_token_ids": None}
    whole = model.generate("abc", **options)
    assert model.generate("abc", **options, return_cache=True)[0] == whole
    pieces = list(model.stream("abc", **options))
    assert all(pieces)
    assert "abc" + "".join(pieces) == whole
    assert model.prefill("abc").num_tokens.tolist() == [3 + add]
    assert model.generate("abc", max_length=3 + add) == "abc"
