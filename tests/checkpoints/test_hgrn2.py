"""Options of HGRN2 checkpoints that the golden files do not have."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from keras_recurrent.models import HGRN2Backbone, HGRN2CausalLM
from tests.checkpoints import golden
from tests.models import reference
from tests.models.tiny import HYBRID, tiny_backbone

pytestmark = pytest.mark.once

# {name in a block of the file: path in a block of the package}; vectors and matrices [out, in].
BLOCK = {
    "attn_norm": "temporal_norm/scale",
    **{f"attn.{name}_proj": f"temporal_block/{name}_proj/kernel" for name in "qfio"},
    **{f"attn.{name}_conv1d": f"temporal_block/{name}_conv1d/kernel" for name in "qfi"},
    "attn.g_norm": "temporal_block/norm/scale",
    "mlp_norm": "channel_norm/scale",
    **{f"mlp.{name}_proj": f"mlp/{name}_proj/kernel" for name in ("gate", "up", "down")},
}


def numpy_logits(tensors, config, token_ids):
    """float64 logits of the tensors of a file, by `tests.models.reference`."""
    tensors = {name: tensor.astype("float64") for name, tensor in tensors.items()}
    weights = {
        "token_embedding/embeddings": tensors["model.embeddings.weight"],
        "token_embedding/reverse_embeddings": tensors["lm_head.weight"].T,
        "lower_bounds/logits": tensors["model.lower_bounds"],
        "final_norm/scale": tensors["model.norm.weight"],
    }
    for i in range(config["num_hidden_layers"]):
        for name, path in BLOCK.items():
            tensor = tensors[f"model.layers.{i}.{name}.weight"]
            # Transposed, a filter [channels, 1, taps] is [taps, 1, channels].
            weights[f"block_{i}/{path}"] = tensor.T[:, 0] if tensor.ndim == 3 else tensor.T
    arguments = {
        "num_layers": config["num_hidden_layers"],
        "expand_ratio": config["expand_ratio"],
        "gate_activation": "silu",
        "input_activation": "linear",
        "tie_word_embeddings": False,
    }
    rows = [reference.document_logits("hgrn2", weights, arguments, row) for row in token_ids]
    return np.stack(rows)


def test_logits_with_short_convolutions_match_numpy(tmp_path):
    """A filter is loaded into another projection, or its taps are reversed."""
    source = golden.DATA / "hgrn2_tiny"
    config = golden.read_config(source) | {"use_short_conv": True, "conv_size": 3}
    tensors, rng = golden.read_tensors(source), np.random.default_rng(0)
    for i in range(config["num_hidden_layers"]):
        for name in "qfi":
            filters = rng.normal(size=(config["hidden_size"], 1, 3)) / np.sqrt(3)
            tensors[f"model.layers.{i}.attn.{name}_conv1d.weight"] = filters.astype("float32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    token_ids = rng.integers(0, 96, (2, 9)).astype("int32")
    logits = golden.logits(HGRN2CausalLM.from_preset(str(tmp_path)), token_ids)
    assert golden.relative_error(logits, numpy_logits(tensors, config, token_ids)) < 1e-6


@pytest.mark.parametrize(
    "variant",
    [
        {"conv_size": 3, "tie_word_embeddings": True},
        {"num_layers": 1},
        {"num_layers": 1, "use_lower_bounds": False},
        HYBRID,
        {**HYBRID, "attention_layers": (1, 2), "num_key_value_heads": None},
    ],
    ids=["short convolutions, tied", "one block", "no lower bounds", "hybrid", "unused bounds"],
)
def test_export_of_each_variant_loads_with_the_same_config_and_weights(variant, tmp_path):
    backbone = tiny_backbone(family="hgrn2", **variant)
    backbone.export_to_transformers(tmp_path)
    tensors = golden.read_tensors(tmp_path)
    assert ("lm_head.weight" in tensors) != backbone.tie_word_embeddings
    assert ("model.lower_bounds" in tensors) == backbone.use_lower_bounds
    if backbone.conv_size:
        shape = tensors["model.layers.1.attn.f_conv1d.weight"].shape
        assert shape == (backbone.hidden_dim, 1, backbone.conv_size)
    reloaded = HGRN2Backbone.from_preset(str(tmp_path))
    assert reloaded.get_config() | {"name": ""} == backbone.get_config() | {"name": ""}
    golden.assert_equal_weights(reloaded, backbone)
