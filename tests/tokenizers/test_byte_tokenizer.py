"""`ByteTokenizer`, whose tokens are bytes."""

import keras
import keras_hub
import pytest

from keras_recurrent.tokenizers import ByteTokenizer
from tests.layers.table import assert_rejects

pytestmark = pytest.mark.once

TEXTS = ["", "hi", "Grüße, 世界 🌍\n", "\x00\x7f"]


def test_detokenize_of_tokens_gives_the_text():
    tokenizer = ByteTokenizer()
    tokens = tokenizer(TEXTS)
    assert tokens == [[byte + 3 for byte in text.encode()] for text in TEXTS]
    assert tokenizer.detokenize(tokens) == TEXTS
    for text in TEXTS[1:]:
        single = tokenizer(text)
        assert single.dtype == "int32"
        assert tokenizer.detokenize(single) == text
    assert tokenizer([["a", "b"], ["c"]]) == [[[100], [101]], [[102]]]


def test_special_tokens_are_parsed_on_request():
    tokenizer = ByteTokenizer()
    ids = tokenizer.tokenize_with_special_tokens(["<start>a<end><pad>", "", "b"])
    assert ids == [[1, 100, 2, 0], [], [101]]
    assert tokenizer("<start>").tolist()[:1] != [1]


def test_vocabulary_has_special_tokens_and_bytes():
    tokenizer = ByteTokenizer()
    assert (tokenizer.pad_token_id, tokenizer.start_token_id, tokenizer.end_token_id) == (0, 1, 2)
    assert sorted(tokenizer.special_token_ids) == [0, 1, 2]
    vocabulary = tokenizer.get_vocabulary()
    assert len(vocabulary) == tokenizer.vocabulary_size() == 259
    for token, id in vocabulary.items():
        assert tokenizer.token_to_id(token) == id
        assert tokenizer.id_to_token(id) == token
    for text in ("é!", "世"):
        assert_rejects("token", tokenizer.token_to_id, text)
    assert_rejects("id", tokenizer.id_to_token, 259)


def test_detokenize_of_any_ids_replaces_invalid_bytes():
    tokenizer = ByteTokenizer()
    cut = tokenizer.tokenize("é")[:1].tolist()
    texts = tokenizer.detokenize([[1, 107, 2, 0], [*cut, 107], [], [107, 31_999]])
    assert texts == ["h", "\ufffdh", "", "h\ufffd"]
    assert ByteTokenizer(errors="ignore").detokenize([*cut, 107, 259]) == "h"
    assert_rejects("utf-8", ByteTokenizer(errors="strict").detokenize, cut)


def test_deserialized_tokenizer_has_the_config():
    tokenizer = ByteTokenizer(errors="ignore", dtype="int64", name="bytes")
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(tokenizer))
    assert copy.get_config() == tokenizer.get_config()
    assert copy("hi").dtype == "int64"
    assert isinstance(copy, keras_hub.tokenizers.Tokenizer)
