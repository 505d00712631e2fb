"""`SentencePieceTokenizer`, with special tokens by their ids."""

import pytest

from keras_recurrent.tokenizers import SentencePieceTokenizer
from tests.layers.table import assert_rejects
from tests.tokenizers.sentence_piece import train

pytestmark = pytest.mark.once


def special_ids(tokenizer):
    return tokenizer.start_token_id, tokenizer.end_token_id, tokenizer.pad_token_id


def test_special_tokens_are_from_the_file_or_the_arguments():
    gemma = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    assert special_ids(SentencePieceTokenizer(train(**gemma))) == (2, 1, 0)
    without_padding = train()  # <unk>, <s>, </s>
    assert special_ids(SentencePieceTokenizer(without_padding)) == (1, 2, 2)
    tokenizer = SentencePieceTokenizer(without_padding, pad_token_id=0, start_token_id=5)
    assert special_ids(tokenizer) == (5, 2, 0)
    assert tokenizer.start_token == tokenizer.id_to_token(5)
    with pytest.raises(ValueError, match="`pad_token_id` must be from 0 to"):
        SentencePieceTokenizer(without_padding, pad_token_id=1000)
    with pytest.raises(ValueError, match=r"`start_token_id` must be .* got None"):
        SentencePieceTokenizer(train(bos_id=-1))


def test_saved_assets_load_as_the_same_tokenizer(tmp_path):
    tokenizer = SentencePieceTokenizer(train(), pad_token_id=0)
    texts = ["all happy families", "are alike", ""]
    assert tokenizer.detokenize(tokenizer(texts)) == texts
    again = SentencePieceTokenizer.from_config(tokenizer.get_config())
    tokenizer.save_assets(str(tmp_path))
    again.load_assets(str(tmp_path))
    assert special_ids(again) == (1, 2, 0)
    assert again(texts) == tokenizer(texts)


def test_detokenize_of_ids_beyond_the_file_keeps_other_text():
    tokenizer = SentencePieceTokenizer(train())
    ids = tokenizer("happy").tolist()
    assert "happy" in tokenizer.detokenize([*ids, 5000])
    assert tokenizer.detokenize([ids, [5000]])[0] == "happy"


def test_special_tokens_are_parsed_on_request():
    tokenizer = SentencePieceTokenizer(train(control_symbols="<turn>", user_defined_symbols="<x>"))
    turn, x = map(tokenizer.token_to_id, ("<turn>", "<x>"))
    ids = tokenizer.tokenize_with_special_tokens("<s>happy<turn>are<x></s>")
    assert ids == [1, *tokenizer("happy"), turn, *tokenizer("are"), x, 2]
    assert turn not in tokenizer("<turn>")


def test_added_tokens_are_special_and_saved(tmp_path):
    """A user's text contains an added token, or the text of an added token is not empty."""
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
    assert_rejects(f"`id` must be .* Received: {size + 1}", again.id_to_token, size + 1)
    for wrong in ([], {"a": "1"}, {"a": 40, "b": 40}, {"a": -1}):
        with pytest.raises(ValueError, match="`added_tokens` must be a dictionary of tokens"):
            SentencePieceTokenizer(added_tokens=wrong)


def test_added_token_replaces_a_token_of_the_file():
    tokenizer = SentencePieceTokenizer(train(), added_tokens={"<|im_end|>": 7})
    assert tokenizer.id_to_token(7) == "<|im_end|>"
    assert tokenizer.token_to_id("<|im_end|>") == 7
    assert tokenizer.tokenize_with_special_tokens("<|im_end|>") == [7]
    assert tokenizer.detokenize([[7]]) == [""]


def test_from_preset_of_bytes_raises():
    with pytest.raises(ValueError, match="'hawk_tiny' has no SentencePiece file"):
        SentencePieceTokenizer.from_preset("hawk_tiny")
