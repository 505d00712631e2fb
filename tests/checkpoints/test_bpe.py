"""Checkpoints with a `tokenizer.json` whose model is BPE."""

import json

import keras
import pytest

from keras_recurrent.checkpoints import loaders
from keras_recurrent.models import GriffinCausalLMPreprocessor
from keras_recurrent.tokenizers import BPETokenizer, SentencePieceTokenizer
from tests.checkpoints import golden
from tests.layers.table import assert_rejects
from tests.tokenizers import bpe

pytestmark = pytest.mark.once


def write_checkpoint(folder, config=None, **content):
    """Writes the golden checkpoint with `tokenizer.json` and `content`, {stem of a file: JSON}."""
    names = "tokenizer.json", "tokenizer_config.json"
    files = {name: (bpe.PATH / name).read_bytes() for name in names}
    files |= {f"{name}.json": value for name, value in content.items()}
    return golden.copy(folder, {"vocab_size": 1000, **(config or {})}, files=files)


def token_ids(tokenizer):
    return tokenizer.start_token_id, tokenizer.end_token_id, tokenizer.pad_token_id


def test_load_with_bpe_file_makes_the_preprocessor(tmp_path):
    """Saving or export loses the file, or a start token is added that the file does not add."""
    path = write_checkpoint(tmp_path / "bpe", config={"bos_token_id": 980, "eos_token_id": 5})
    model = golden.model(path, load_weights=False, sequence_length=20)
    tokenizer = model.preprocessor.tokenizer
    assert type(tokenizer) is BPETokenizer
    assert token_ids(tokenizer) == (None, 982, 980)
    assert not model.preprocessor.add_start_token
    x = model.preprocessor.generate_preprocess(["hi you"])
    length = keras.ops.convert_to_numpy(x["padding_mask"]).sum()
    assert length == len(tokenizer("hi you"))
    model.save_to_preset(str(tmp_path / "keras"))
    model.export_to_transformers(tmp_path / "export")
    exported = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    tokens = (exported["bos_token"], exported["eos_token"], exported["pad_token"])
    assert tokens == (None, "<|im_end|>", "<|endoftext|>")
    for folder in ("keras", "export"):
        again = BPETokenizer.from_preset(str(tmp_path / folder))
        assert again.tokenizer_json == (bpe.PATH / "tokenizer.json").read_bytes()
        assert token_ids(again) == token_ids(tokenizer)
    assert BPETokenizer.from_preset(str(path), end_token_id=5).end_token_id == 5
    with pytest.raises(ValueError, match=r"The tokenizer of .* is a `BPETokenizer`"):
        SentencePieceTokenizer.from_preset(str(path))


@pytest.mark.parametrize(
    ("config", "content", "expected"),
    [
        ({}, {"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, (None, 982, 982)),
        ({"bos_token_id": 7}, {"tokenizer_config": {"eos_token": "a"}}, (7, 64, 64)),
        ({}, {"special_tokens_map": {"pad_token": "b"}, "tokenizer_config": {}}, (None, 3, 65)),
        ({"eos_token_id": [4, 5]}, {"tokenizer_config": {"bos_token": "a"}}, (64, 4, 4)),
    ],
    ids=["tokenizer_config", "config", "special_tokens_map and generation_config", "list of ids"],
)
def test_special_tokens_come_from_files_in_order_of_precedence(tmp_path, config, content, expected):
    content = {"generation_config": {"eos_token_id": 3}, **content}
    config = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **config}
    path = write_checkpoint(tmp_path / "bpe", config=config, **content)
    assert token_ids(BPETokenizer.from_preset(str(path))) == expected


def test_preprocessor_adds_start_token_where_the_bpe_file_does(tmp_path):
    start = "<|im_start|>"
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": start, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {start: {"id": start, "ids": [981], "tokens": [start]}},
    }
    path = write_checkpoint(tmp_path / "bpe", tokenizer_config={"bos_token": start})
    (path / "tokenizer.json").write_bytes(bpe.changed_file({("post_processor",): template}))
    preprocessor = GriffinCausalLMPreprocessor.from_preset(str(path))
    assert preprocessor.add_start_token
    assert preprocessor.tokenizer(["a"]) == [[64]]
    preprocessor = GriffinCausalLMPreprocessor.from_preset(str(path), add_start_token=False)
    assert not preprocessor.add_start_token


def test_load_with_broken_bpe_file_raises_unless_sentence_piece_exists(
    tmp_path, monkeypatch, sentence_piece
):
    """A broken tokenizer is found only after the weights are read."""
    path = write_checkpoint(tmp_path / "bpe", tokenizer_config={"eos_token": "<none>"})
    monkeypatch.setattr(loaders.RecurrentPresetLoader, "load_backbone", None)
    assert_rejects(r"'eos_token' is '<none>' in tokenizer_config.json of", golden.model, path)
    file = path / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-100])
    assert_rejects(f"No tokenizer can be made of {file}: it is not JSON", golden.model, path)
    (path / "tokenizer.model").write_bytes(sentence_piece)
    assert type(SentencePieceTokenizer.from_preset(str(path))) is SentencePieceTokenizer
