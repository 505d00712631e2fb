"""`export_to_transformers`: shards, dtypes, memory, and models that a layout cannot hold."""

import json
import tracemalloc

import keras
import numpy as np
import pytest

from keras_recurrent.checkpoints import export
from keras_recurrent.models import HGRN2Backbone
from tests.checkpoints import golden
from tests.layers.table import assert_rejects
from tests.models.tiny import FAMILIES, HYBRID, tiny_backbone, weights_of

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def model():
    return golden.model()


def test_export_in_shards_loads_with_the_same_weights(model, tmp_path):
    """A shard exceeds `max_shard_size`, its name or the index is wrong, or temporary files stay."""
    path = tmp_path / "new" / "checkpoint"
    model.export_to_transformers(path, max_shard_size=1e-4)
    assert [folder.name for folder in path.parent.iterdir()] == ["checkpoint"]
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert all(file.stat().st_size < 1.2e-4 * 1024**3 for file in path.glob("*.safetensors"))
    golden.assert_tensors(path, golden.read_tensors(golden.PATH), "float32")
    golden.assert_equal_weights(golden.model(path), model)


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ({"intermediate_size": 8192, "vocab_size": 1024, "num_hidden_layers": 6}, 0.5),
        # Keras on torch copies a bfloat16 array, then again to float32: five embeddings in all.
        ({"vocab_size": 2**16, "num_hidden_layers": 1}, 1.25),
    ],
    ids=["many tensors", "large tensor"],
)
def test_load_reads_tensors_one_by_one_without_copies(tmp_path, sizes, most):
    """Peak memory of Python and NumPy exceeds a fraction of the size of a bfloat16 checkpoint."""
    large = {"hidden_size": 256, "intermediate_size": 512, "lru_width": 256, **sizes}
    config_only = golden.copy(tmp_path / "config", config=large)
    (config_only / "model.safetensors").unlink()
    with keras.device("cpu"):
        fresh = golden.model(config_only, load_weights=False)
    path = tmp_path / "large"
    fresh.export_to_transformers(path, dtype="bfloat16")
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    tracemalloc.start()
    golden.model(path, dtype="bfloat16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # JAX and TensorFlow may adopt NumPy's memory for the weights.
    weights = 0 if keras.backend.backend() == "torch" else size
    assert peak - weights < most * size


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
def test_export_of_hgrn2_variant_loads_with_the_same_config_and_weights(variant, tmp_path):
    """A filter is saved as that of another projection, or its taps are reversed."""
    backbone = tiny_backbone(family="hgrn2", **variant)
    backbone.export_to_transformers(tmp_path)
    tensors = golden.read_tensors(tmp_path)
    assert ("lm_head.weight" in tensors) != backbone.tie_word_embeddings
    assert ("model.lower_bounds" in tensors) == backbone.use_lower_bounds
    for name in "qfi" if backbone.conv_size else ():
        filters = tensors[f"model.layers.1.attn.{name}_conv1d.weight"]  # [channels, 1, taps]
        kernel = weights_of(backbone)[f"block_1/temporal_block/{name}_conv1d/kernel"]
        np.testing.assert_array_equal(filters[:, 0].T, kernel)
    reloaded = HGRN2Backbone.from_preset(str(tmp_path))
    assert reloaded.get_config() | {"name": ""} == backbone.get_config() | {"name": ""}
    golden.assert_equal_weights(reloaded, backbone)


def test_export_merges_lora_weights(tmp_path):
    model = golden.model()
    model.backbone.enable_lora(2)
    for weight in model.backbone.trainable_weights:
        weight.assign(0.1 * np.random.default_rng(0).normal(size=weight.shape))
    model.export_to_transformers(tmp_path / "merged")
    token_ids = golden.arrays()["token_ids"]
    expected = golden.logits(model, token_ids)
    merged = golden.logits(golden.model(tmp_path / "merged"), token_ids)
    assert golden.relative_error(merged, expected) < 3e-6
    assert golden.relative_error(golden.logits(golden.model(), token_ids), expected) > 0.01


@pytest.mark.parametrize(
    ("dtype", "value", "text"),
    [("float16", 1e6, r"1e\+06"), ("bfloat16", 3.4e38, r"3.4e\+38")],
)
def test_export_of_value_beyond_the_dtype_names_tensor_and_value(tmp_path, dtype, value, text):
    """An export overflows to infinity, or writes files before it raises."""
    model = golden.model()
    kernel = model.backbone.transformer_layers[1].mlp.up_proj.kernel
    values = keras.ops.convert_to_numpy(kernel).copy()
    values[3, 5] = -value
    kernel.assign(values)
    name = r"'model\.layers\.1\.mlp_block\.up_proj\.weight'"
    with pytest.raises(ValueError, match=f"{dtype} holds .*{name} .*has one of {text}"):
        model.export_to_transformers(tmp_path / "new" / "export", dtype=dtype)
    assert not list(tmp_path.iterdir())
    values[3, 5] = 65504  # the largest of float16
    kernel.assign(values)
    model.export_to_transformers(tmp_path / "export", dtype=dtype)


GRIFFIN = {
    "lru_width": None,
    "sliding_window": None,
    "num_blocks": 8,
    "block_types": ("global_attention",),
    "embedding_scale": 16**0.5 + 1e-3,
    "final_logit_soft_cap": None,
    "recurrence": "cg_lru",
    "scale_first_input": True,
    "partial_rotary_factor": 0.0,
    "layer_norm_epsilon": 0.0,
}
HAWK = {"num_query_heads": None, "block_types": ("recurrent",), "embedding_scale": 4.0}
HGRN2 = {"gate_activation": "sigmoid", "input_activation": "silu", "layer_norm_epsilon": 0.0}
TRANSNORMER = {"decay_schedule": "paper", "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}


# (family, further arguments of the backbone, arguments that the error names)
@pytest.mark.parametrize(
    ("family", "arguments", "unsupported"),
    [
        ("griffin", GRIFFIN, GRIFFIN),
        ("griffin", HAWK, {"num_query_heads": None, "final_logit_soft_cap": None}),
        ("hgrn2", {"num_layers": 1, **HGRN2}, HGRN2),
        ("transnormer", {"num_layers": 1, **TRANSNORMER}, TRANSNORMER),
        ("lightning_hybrid", {"residual_scale": None}, {"embedding_scale": 3.0}),
        ("lfm2", {"layer_norm_epsilon": 0.0}, {"layer_norm_epsilon": 0.0}),
    ],
    ids=["griffin", "hawk", "hgrn2", "transnormer", "lightning_hybrid", "lfm2"],
)
def test_export_of_unsupported_arguments_names_all(tmp_path, family, arguments, unsupported):
    """An argument is left out of the error, or the export silently loses its value."""
    cls, sizes = FAMILIES[family].backbone, FAMILIES[family].sizes
    with pytest.raises(ValueError, match="save_to_preset") as raised:
        cls(**{**sizes, **arguments}).export_to_transformers(tmp_path / "export")
    for name, value in unsupported.items():
        assert f"`{name}` is {value!r}, and must be " in str(raised.value)
    if family == "griffin" and "num_blocks" in arguments:
        assert "4.0, which is sqrt(hidden_dim) rounded to bfloat16" in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dtype": "int8"}, "`dtype` must be one of float32"),
        ({"max_shard_size": 0}, "`max_shard_size` must be a number of gigabytes"),
        ({"max_shard_size": "5GB"}, "`max_shard_size` must be a number of gigabytes"),
    ],
)
def test_export_with_invalid_argument_names_it_and_writes_nothing(
    model, tmp_path, arguments, match
):
    assert_rejects(match, model.export_to_transformers, tmp_path / "export", **arguments)
    assert not list(tmp_path.iterdir())


def test_export_onto_links_or_files_raises_and_keeps_them(model, tmp_path, monkeypatch):
    """An export follows a symbolic link, or replaces files that another process wrote meanwhile."""
    directory, config = tmp_path / "directory", tmp_path / "directory" / "config.json"
    directory.mkdir()
    for target in (directory, tmp_path / "nothing"):
        link = tmp_path / f"link to {target.name}"
        link.symlink_to(target)
        with pytest.raises(FileExistsError, match="is a symbolic link"):
            model.export_to_transformers(link)
    write_tokenizer = export.tokenizer_files.write

    def write_while_another_process_exports(*arguments):
        config.write_text("{}")
        return write_tokenizer(*arguments)

    monkeypatch.setattr(export.tokenizer_files, "write", write_while_another_process_exports)
    with pytest.raises(FileExistsError, match="was empty when this export began"):
        model.export_to_transformers(directory)
    with pytest.raises(FileExistsError, match="not empty"):
        model.export_to_transformers(directory)
    assert config.read_text() == "{}"
    assert not list(tmp_path.glob(".*.part"))


def test_export_of_quantized_model_raises(tmp_path):
    model = golden.model()
    model.quantize("int8")
    assert_rejects("before `quantize`", model.export_to_transformers, tmp_path / "export")
    assert not list(tmp_path.iterdir())
