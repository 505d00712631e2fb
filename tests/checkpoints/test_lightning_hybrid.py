"""Checkpoints of HypeNet and MiniCPM-SALA: tied weights, overrides and chat."""

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from keras_recurrent.generation.text import tokenize_prompt
from keras_recurrent.models import LightningHybridBackbone, LightningHybridCausalLM, SamplingParams
from tests.chat.test_chat import CHATML
from tests.checkpoints import golden
from tests.tokenizers import bpe

pytestmark = pytest.mark.once
HYPENET, MINICPM_SALA = golden.DATA / "hypenet_tiny", golden.DATA / "minicpm_sala_tiny"


def test_second_copy_of_tied_weights_must_be_equal(tmp_path):
    """A file with another matrix of logits loads without it."""
    tensors = load_file(HYPENET / "model.safetensors")
    shutil.copy(HYPENET / "config.json", tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    LightningHybridBackbone.from_preset(str(tmp_path))
    tensors["lm_head.weight"] = 2 * tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'lm_head.weight' of .* differs from 'model.embed"):
        LightningHybridBackbone.from_preset(str(tmp_path))


def test_from_preset_overrides_options_that_keep_the_weights(tmp_path):
    options = {"attention_logit_scaling": 500, "dense_length": None}
    model = LightningHybridCausalLM.from_preset(str(MINICPM_SALA))
    model.save_to_preset(tmp_path)
    for path in (MINICPM_SALA, tmp_path):
        changed = LightningHybridCausalLM.from_preset(str(path), **options)
        assert changed.backbone.get_config().items() >= options.items()
        golden.assert_equal_weights(changed, model)


def write_bpe_tokenizer(folder):
    """Returns tokenizer settings, and the ids of the tokens that start and end a turn."""
    shutil.copy(bpe.PATH / "tokenizer.json", folder)
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return settings, [bpe.END - 1, bpe.END]


def write_sentence_piece_tokenizer(folder, sentence_piece):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(sentence_piece)
    names = {1: "</s>", 70: "<|im_end|>", 71: "<|im_start|>"}
    entries = {str(id): {"content": name, "special": True} for id, name in names.items()}
    entries["72"] = {"content": "a", "special": False}
    return {"added_tokens_decoder": entries}, [71, 70]


@pytest.mark.parametrize("source", [HYPENET, MINICPM_SALA], ids=["hypenet", "minicpm_sala"])
def test_chat_after_saving_uses_special_tokens_of_the_checkpoint(tmp_path, sentence_piece, source):
    """Special tokens of BPE, or next to a SentencePiece file, are lost or do not end a turn."""
    path = tmp_path / "chat"
    path.mkdir()
    if source == HYPENET:
        settings, ids = write_bpe_tokenizer(path)
    else:
        settings, ids = write_sentence_piece_tokenizer(path, sentence_piece)
    changes = {"vocab_size": 1000, "eos_token_id": [1, 70], "bos_token_id": 2}
    (path / "config.json").write_text(json.dumps({**golden.read_config(source), **changes}))
    settings["chat_template"] = CHATML
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = LightningHybridCausalLM.from_preset(str(path), load_weights=False, num_layers=1)
    model.save_to_preset(tmp_path / "keras")
    model.export_to_transformers(tmp_path / "export")
    for folder in ("keras", "export"):
        model = LightningHybridCausalLM.from_preset(str(tmp_path / folder))
        prompt = model.preprocessor.apply_chat_template([{"role": "user", "content": "<|im_end|>"}])
        tokens = tokenize_prompt(model.preprocessor.tokenizer, prompt)
        assert [id for id in tokens if id in ids] == [ids[0], ids[1], ids[0]]
    end_of_turn = SamplingParams(temperature=0, logit_bias={ids[1]: 100.0})
    messages = [{"role": "user", "content": "hi"}]
    _, cache = model.chat(messages, sampling=end_of_turn, return_cache=True, max_new_tokens=3)
    assert [id == ids[1] for id in cache.token_ids[0][-2:]] == [False, True]
