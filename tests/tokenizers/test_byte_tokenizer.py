"""Text to bytes and back."""

import grain
import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.tokenizers import ByteTokenizer

pytestmark = pytest.mark.once

TEXTS = ["", "hi", "Grüße, 世界 🌍\n", "\x00\x7f"]


def test_text_comes_back_as_it_was():
    tokenizer = ByteTokenizer()
    tokens = tokenizer(TEXTS)
    assert tokens == [[byte + 3 for byte in text.encode()] for text in TEXTS]
    assert tokenizer.detokenize(tokens) == TEXTS
    for text in TEXTS[1:]:
        single = tokenizer(text)
        assert single.dtype == "int32"
        assert tokenizer.detokenize(single) == text
    assert tokenizer([["a", "b"], ["c"]]) == [[[100], [101]], [[102]]]


def test_special_tokens_and_the_vocabulary():
    tokenizer = ByteTokenizer()
    assert (tokenizer.pad_token_id, tokenizer.start_token_id, tokenizer.end_token_id) == (0, 1, 2)
    assert sorted(tokenizer.special_token_ids) == [0, 1, 2]
    vocabulary = tokenizer.get_vocabulary()
    assert len(vocabulary) == tokenizer.vocabulary_size() == 259
    for token, id in vocabulary.items():
        assert tokenizer.token_to_id(token) == id
        assert tokenizer.id_to_token(id) == token
    for bad in ("é!", "世"):
        with pytest.raises(ValueError, match="token"):
            tokenizer.token_to_id(bad)
    with pytest.raises(ValueError, match="id"):
        tokenizer.id_to_token(259)


def test_what_a_model_may_write_is_never_an_error():
    tokenizer = ByteTokenizer()
    cut = tokenizer.tokenize("é")[:1].tolist()
    assert tokenizer.detokenize([[1, 107, 2, 0], [*cut, 107], [], [107, 31_999]]) == [
        "h",
        "\ufffdh",
        "",
        "h\ufffd",
    ]
    assert ByteTokenizer(errors="ignore").detokenize([*cut, 107, 259]) == "h"
    with pytest.raises(ValueError, match="utf-8"):
        ByteTokenizer(errors="strict").detokenize(cut)


def test_it_serializes():
    tokenizer = ByteTokenizer(errors="ignore", dtype="int64", name="bytes")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(tokenizer))
    assert again.get_config() == tokenizer.get_config()
    assert again("hi").dtype == "int64"
    assert isinstance(again, keras_hub.tokenizers.Tokenizer)


def test_it_runs_in_grain_pipelines():
    tokens = list(grain.MapDataset.source(TEXTS[1:]).map(ByteTokenizer()))
    assert all(isinstance(t, np.ndarray) for t in tokens)
    assert [ByteTokenizer().detokenize(t) for t in tokens] == TEXTS[1:]


def test_it_runs_in_tensorflow_pipelines():
    tf = pytest.importorskip("tensorflow")
    tokenizer = ByteTokenizer()
    texts = tf.data.Dataset.from_tensor_slices(TEXTS)
    for tokens in (texts.map(tokenizer), texts.batch(3).map(tokenizer)):
        assert tokens.element_spec.dtype == tf.int32
        again = [text for batch in tokens.map(tokenizer.detokenize) for text in np.ravel(batch)]
        assert [text.decode() for text in again] == TEXTS
    invalid = tf.data.Dataset.from_tensors([1, 198, 107, 400, 2, 0]).map(tokenizer.detokenize)
    assert next(iter(invalid)).numpy().decode() == "\ufffdh\ufffd"
