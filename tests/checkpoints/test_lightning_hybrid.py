"""Configurations of HypeNet and MiniCPM-SALA: values that are read, and refused ones."""

import json
import shutil

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_recurrent.chat.templates import tokenize_prompt
from keras_recurrent.models import (
    LightningHybridBackbone,
    LightningHybridCausalLM,
    SamplingParams,
)
from keras_recurrent.models.lightning_hybrid.checkpoint import HypeNet, MiniCPMSALA
from keras_recurrent.presets.lightning_hybrid import SIZES
from tests.checkpoints import golden
from tests.models.tiny import FAMILIES
from tests.tokenizers import bpe

pytestmark = pytest.mark.once
DATA = golden.PATH.parent
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYOUTS = {"hypenet": HypeNet(), "minicpm_sala": MiniCPMSALA()}


def config(model_type):
    return json.loads((DATA / f"{model_type}_tiny" / "config.json").read_text())


def read(model_type, drop=(), **changes):
    content = {k: v for k, v in {**config(model_type), **changes}.items() if k not in drop}
    return LAYOUTS[model_type].backbone_arguments(content, "config.json")


@pytest.mark.parametrize("name", SIZES)
def test_presets_are_written_and_read(name):
    """The multipliers of MiniCPM-SALA lose no digit; the tensors have all parameters."""
    layout = LAYOUTS["minicpm_sala" if name == "minicpm_sala" else "hypenet"]
    given = SIZES[name].backbone_arguments
    rest = ("attention_logit_scaling", "embedding_scale", "residual_scale", "output_scale")
    arguments = dict.fromkeys((*rest, "dense_length"))
    arguments |= {"use_qk_norm": True, "layer_norm_epsilon": 1e-6, **given}
    written = layout.config(arguments)
    if name == "minicpm_sala":
        published = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
        assert {key: written[key] for key in published} == published
        assert written["sparse_config"]["dense_len"] == 8192
    tensors = layout.tensors(arguments)
    assert sum(int(np.prod(tensor.shape)) for tensor in tensors) == SIZES[name].parameters


UNSUPPORTED = [
    ("hypenet", "lightning_use_short_conv", True),
    ("hypenet", "lightning_use_qk_norm", False),
    ("hypenet", "lightning_use_output_norm", False),
    ("hypenet", "lightning_use_output_gate", False),
    ("hypenet", "attn_use_output_gate", False),
    ("hypenet", "attn_use_rope", True),
    ("hypenet", "rope_scaling", {"type": "yarn"}),
    ("hypenet", "lightning_rope_scaling", {"type": "yarn"}),
    ("hypenet", "attention_bias", True),
    ("hypenet", "hidden_act", "gelu"),
    ("hypenet", "mixer_types", ["gdn"] * 4),
    ("hypenet", "mixer_types", ["attn"] * 3),
    ("hypenet", "attn_logits_scaling", 2.0),
    ("hypenet", "attn_logits_scaling", "hype 1"),
    ("hypenet", "num_key_value_heads", 3),
    ("hypenet", "lightning_nkv", 3),
    ("hypenet", "lightning_head_dim", 23),
    ("minicpm_sala", "qk_norm", False),
    ("minicpm_sala", "attn_use_rope", True),
    ("minicpm_sala", "lightning_nh", 8),
    ("minicpm_sala", "lightning_head_dim", 8),
    ("minicpm_sala", "head_dim", 8),
    ("minicpm_sala", "pretraining_tp", 2),
    ("minicpm_sala", "mixer_types", ["lightning-attn"] * 4),
]


@pytest.mark.parametrize(("model_type", "key", "value"), UNSUPPORTED)
def test_what_is_not_served(model_type, key, value):
    with pytest.raises(ValueError, match=f"'{key}' is .* in config.json; this version supports"):
        read(model_type, **{key: value})


def test_defaults_are_those_of_the_originals():
    """HypeNet's norms and gates are off if its file does not name them."""
    for key in ("lightning_use_qk_norm", "attn_use_output_gate"):
        with pytest.raises(ValueError, match=f"'{key}' is False"):
            read("hypenet", drop=[key])
    everywhere = read("hypenet", mixer_types=[])
    assert everywhere["block_types"] == ("global_attention",) * 4
    assert read("hypenet", attn_logits_scaling="hype 500")["attention_logit_scaling"] == 500
    assert read("hypenet", attn_logits_scaling="hype")["attention_logit_scaling"] == 362
    assert read("hypenet", lightning_scale="1/d")["lightning_query_scale"] == 1 / 24
    sparse = {**config("minicpm_sala")["sparse_config"], "use_nope": True}
    with pytest.raises(ValueError, match="'use_nope' is True in 'sparse_config'"):
        read("minicpm_sala", sparse_config=sparse)
    assert read("minicpm_sala", sparse_config=None)["dense_length"] is None


def test_a_second_copy_of_tied_weights(tmp_path):
    """Published files may hold it or not; another matrix of logits is not dropped silently."""
    source = DATA / "hypenet_tiny"
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config("hypenet")))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    LightningHybridBackbone.from_preset(str(tmp_path))
    tensors["lm_head.weight"] = 2 * tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'lm_head.weight' of .* differs from 'model.embed"):
        LightningHybridBackbone.from_preset(str(tmp_path))


def test_options_that_keep_the_weights(tmp_path):
    """`from_preset` takes them for published weights and for saved ones."""
    options = {"attention_logit_scaling": 500, "dense_length": None}
    model = LightningHybridCausalLM.from_preset(str(DATA / "minicpm_sala_tiny"))
    model.save_to_preset(tmp_path)
    for path in (DATA / "minicpm_sala_tiny", tmp_path):
        changed = LightningHybridCausalLM.from_preset(str(path), **options)
        assert changed.backbone.get_config().items() >= options.items()
        for a, b in zip(changed.weights, model.weights, strict=True):
            np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (a, b)))


@pytest.mark.parametrize("model_type", ["hypenet", "minicpm_sala"])
def test_chat(tmp_path, sentence_piece, model_type):
    """Special tokens of BPE, and those next to a SentencePiece file, end turns and are saved."""
    path = tmp_path / "chat"
    path.mkdir()
    changes = {"vocab_size": 1000, "eos_token_id": [1, 70], "bos_token_id": 2}
    settings = {"chat_template": CHATML}
    if model_type == "hypenet":
        shutil.copy(bpe.PATH / "tokenizer.json", path)
        settings |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        ids = [bpe.END - 1, bpe.END]
    else:
        (path / "tokenizer.json").write_text("{}")
        (path / "tokenizer.model").write_bytes(sentence_piece)
        names = {1: "</s>", 70: "<|im_end|>", 71: "<|im_start|>"}
        entries = {str(id): {"content": name, "special": True} for id, name in names.items()}
        settings["added_tokens_decoder"] = {**entries, "72": {"content": "a", "special": False}}
        ids = [71, 70]
    (path / "config.json").write_text(json.dumps({**config(model_type), **changes}))
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


def test_what_the_layouts_cannot_hold(tmp_path):
    backbone = LightningHybridBackbone(
        **{**FAMILIES["lightning_hybrid"].sizes, "residual_scale": None}
    )
    with pytest.raises(ValueError, match="save_to_preset") as raised:
        backbone.export_to_transformers(tmp_path / "export")
    assert "`embedding_scale` is 3.0, and must be None" in str(raised.value)
