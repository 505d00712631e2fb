"""What a `config.json` of TransNormerLLM says, and what is not served."""

import numpy as np
import pytest

from keras_recurrent.models import TransNormerBackbone
from keras_recurrent.models.transnormer.checkpoint import TransNormer
from keras_recurrent.presets.transnormer import SIZES

pytestmark = pytest.mark.once


def published(size):
    """As the published code writes it, where defaults are left out or not."""
    return {
        "_name_or_path": "transnormer",
        "add_bos_token": False,
        "architectures": ["TransnormerForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_transnormer.TransnormerConfig"},
        "bias": False,
        "bos_token_id": 1,
        "decoder_attention_heads": size.heads,
        "decoder_embed_dim": size.hidden_dim,
        "decoder_layers": size.num_layers,
        "eos_token_id": 2,
        "glu_dim": size.intermediate_dim,
        "hidden_dim": size.hidden_dim,
        "init_std": 0.02,
        "linear_act_fun": "swish",
        "linear_use_lrpe_list": [1, *[0] * (size.num_layers - 1)],
        "model_type": "transnormer",
        "no_scale_embedding": False,
        "norm_type": "simplermsnorm",
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.31.0",
        "use_cache": True,
        "vocab_size": size.vocabulary_size,
    }


CONFIG = published(SIZES["tnl_385m"])


@pytest.mark.parametrize("name", ["tnl_385m", "tnl_1b", "tnl_7b"])
def test_published_configurations_are_the_presets(name):
    arguments = TransNormer().backbone_arguments(published(SIZES[name]), "config.json")
    preset = SIZES[name].backbone_arguments
    assert {key: preset.get(key, arguments[key]) for key in arguments} == arguments
    tensors = TransNormer().tensors(arguments)
    assert sum(int(np.prod(tensor.shape)) for tensor in tensors) == SIZES[name].parameters


def test_widths():
    arguments = TransNormer().backbone_arguments(
        {**CONFIG, "glu_dim": -1, "hidden_dim": 512}, "config.json"
    )
    assert (arguments["intermediate_dim"], arguments["head_dim"]) == (1024, 64)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("linear_use_lrpe_list", [0] * 24),
        ("linear_use_lrpe_list", [1]),
        ("linear_act_fun", "relu"),
        ("norm_type", "layernorm"),
        ("no_scale_embedding", True),
        ("bias", True),
        ("tie_word_embeddings", True),
        ("glu_dim", -2),
        ("hidden_dim", 1001),
        ("decoder_layers", 0),
    ],
)
def test_what_is_not_served(key, value):
    with pytest.raises(ValueError, match=f"'{key}' is .* in config.json; this version supports"):
        TransNormer().backbone_arguments({**CONFIG, key: value}, "config.json")


def test_keys_that_are_missing_or_not_known():
    for key in ("decoder_embed_dim", "decoder_layers", "decoder_attention_heads", "vocab_size"):
        config = {k: v for k, v in CONFIG.items() if k != key}
        with pytest.raises(ValueError, match=f"has no '{key}'"):
            TransNormer().backbone_arguments(config, "config.json")
    with pytest.raises(ValueError, match="has 'window', which this version does not know"):
        TransNormer().backbone_arguments({**CONFIG, "window": 7}, "config.json")


def test_what_the_layout_cannot_hold(tmp_path):
    sizes = {"vocabulary_size": 9, "num_layers": 1, "hidden_dim": 4, "intermediate_dim": 4}
    unfit = {"decay_schedule": "paper", "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}
    backbone = TransNormerBackbone(**sizes, num_heads=2, head_dim=2, **unfit)
    with pytest.raises(ValueError, match="save_to_preset") as raised:
        backbone.export_to_transformers(tmp_path / "export")
    for name, value in unfit.items():
        assert f"`{name}` is {value!r}, and must be " in str(raised.value)
    assert not list(tmp_path.iterdir())
