"""SentencePiece by ids."""

import keras
import numpy as np
import pytest

from keras_recurrent.models import GriffinCausalLMPreprocessor
from keras_recurrent.tokenizers import SentencePieceTokenizer
from tests.tokenizers.sentence_piece import train

pytestmark = pytest.mark.once


def special(tokenizer):
    return tokenizer.start_token_id, tokenizer.end_token_id, tokenizer.pad_token_id


@pytest.mark.once
def test_special_tokens_are_those_of_the_file_unless_others_are_given():
    gemma = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    assert special(SentencePieceTokenizer(train(**gemma))) == (2, 1, 0)
    without_padding = train()  # <unk>, <s>, </s>
    assert special(SentencePieceTokenizer(without_padding)) == (1, 2, 2)
    tokenizer = SentencePieceTokenizer(without_padding, pad_token_id=0, start_token_id=5)
    assert special(tokenizer) == (5, 2, 0)
    assert tokenizer.start_token == tokenizer.id_to_token(5)
    with pytest.raises(ValueError, match="`pad_token_id` must be from 0 to"):
        SentencePieceTokenizer(without_padding, pad_token_id=1000)
    with pytest.raises(ValueError, match=r"`start_token_id` must be .* got None"):
        SentencePieceTokenizer(train(bos_id=-1))


def test_it_packs_and_comes_back(tmp_path):
    tokenizer = SentencePieceTokenizer(train(), pad_token_id=0)
    texts = ["all happy families", "are alike", ""]
    assert tokenizer.detokenize(tokenizer(texts)) == texts
    again = SentencePieceTokenizer.from_config(tokenizer.get_config())
    tokenizer.save_assets(str(tmp_path))
    again.load_assets(str(tmp_path))
    assert special(again) == (1, 2, 0)
    rows = [
        keras.tree.map_structure(
            keras.ops.convert_to_numpy,
            GriffinCausalLMPreprocessor(one, sequence_length=16, packed=True)(texts),
        )
        for one in (tokenizer, again)
    ]
    keras.tree.map_structure(np.testing.assert_array_equal, *rows)
    assert rows[0][0]["token_ids"][0, 0] == 1


def test_tokens_beyond_the_file_are_unknown():
    tokenizer = SentencePieceTokenizer(train())
    ids = tokenizer("happy").tolist()
    assert "happy" in tokenizer.detokenize([*ids, 5000])
    assert tokenizer.detokenize([ids, [5000]])[0] == "happy"


def test_added_tokens(tmp_path):
    """They are special: plain text in a text, without text when detokenized, and saved."""
    size = SentencePieceTokenizer(train()).vocabulary_size()
    added = {"<s>": 1, "<|im_end|>": size, "<|im_start|>": size + 2}
    tokenizer = SentencePieceTokenizer(train(), end_token_id=size, added_tokens=added)
    plain = tokenizer("happy<|im_end|>").tolist()
    assert max(plain) < size
    again = SentencePieceTokenizer.from_config(tokenizer.get_config())
    tokenizer.save_assets(str(tmp_path))
    again.load_assets(str(tmp_path))
    ids = again.tokenize_with_special_tokens("<s>happy<|im_end|>")
    assert ids == [1, *again("happy"), size]
    assert again.detokenize([ids, [size + 2]]) == ["happy", ""]
    assert (again.end_token, again.end_token_id) == ("<|im_end|>", size)
    assert set(again.special_token_ids) == {1, 2, size, size + 2}
    assert again.vocabulary_size() == len(again.get_vocabulary()) == size + 3
    assert again.id_to_token(again.token_to_id("<|im_start|>")) == "<|im_start|>"
    with pytest.raises(ValueError, match=f"`id` must be .* Received: {size + 1}"):
        again.id_to_token(size + 1)
    for wrong in ([], {"a": "1"}, {"a": 40, "b": 40}, {"a": -1}):
        with pytest.raises(ValueError, match="`added_tokens` must be a dictionary of tokens"):
            SentencePieceTokenizer(added_tokens=wrong)


def test_added_tokens_replace_tokens_of_the_file():
    """An added token is ignored if the file has its id with another text."""
    tokenizer = SentencePieceTokenizer(train(), added_tokens={"<|im_end|>": 7})
    assert tokenizer.id_to_token(7) == "<|im_end|>"
    assert tokenizer.token_to_id("<|im_end|>") == 7
    assert tokenizer.tokenize_with_special_tokens("<|im_end|>") == [7]
    assert tokenizer.detokenize([[7]]) == [""]


def test_it_runs_inside_a_tensorflow_pipeline():
    tf = pytest.importorskip("tensorflow")
    pytest.importorskip("tensorflow_text")
    tokenizer = SentencePieceTokenizer(train(), added_tokens={"<end>": 98})
    texts = tf.data.Dataset.from_tensor_slices(["all happy", "families"]).batch(2)
    (tokens,) = texts.map(tokenizer)
    assert tokens.to_list() == [list(row) for row in tokenizer(["all happy", "families"])]
    (found,) = texts.map(lambda x: tokenizer.detokenize(tf.concat([tokenizer(x), [[99], [99]]], 1)))
    assert [text.decode().startswith("all happy") for text in found.numpy()] == [True, False]
    (found,) = texts.map(lambda x: tokenizer.detokenize(tf.concat([tokenizer(x), [[98], [98]]], 1)))
    assert found.numpy().tolist() == [b"all happy", b"families"]


@pytest.mark.once
def test_a_preset_of_bytes_has_no_file():
    with pytest.raises(ValueError, match="'hawk_tiny' has no SentencePiece file"):
        SentencePieceTokenizer.from_preset("hawk_tiny")
