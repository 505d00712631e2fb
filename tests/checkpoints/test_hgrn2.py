"""A published HGRN2 gives the numbers that an independent program computes from it.

`golden.npz` holds the recurrence, token by token in float64; flash-linear-attention 0.6.0 agrees
on a GPU.
"""

import json
import pathlib

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_recurrent.models import HGRN2Backbone, HGRN2CausalLM
from keras_recurrent.models.hgrn2.checkpoint import HGRN2Layout
from keras_recurrent.presets.hgrn2 import SIZES
from tests.checkpoints import golden
from tests.models import reference
from tests.models.tiny import HYBRID, tiny_backbone

PATH = pathlib.Path(__file__).parents[1] / "data" / "hgrn2_tiny"
CONFIG = json.loads((PATH / "config.json").read_text())
SAME = 1e-6


@pytest.fixture(scope="module")
def model():
    return HGRN2CausalLM.from_preset(str(PATH))


@pytest.fixture(scope="module")
def wanted():
    with np.load(PATH / "golden.npz") as file:
        return dict(file)


def test_logits_and_loss(model, wanted):
    token_ids = wanted["token_ids"]
    logits = golden.logits(model, token_ids)
    assert golden.relative(logits, wanted["logits"]) < SAME
    z = logits[:, :-1].astype("float64")
    log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    loss = -np.take_along_axis(log_p, token_ids[:, 1:, None], axis=-1).mean()
    np.testing.assert_allclose(loss, wanted["loss"], rtol=SAME)


@pytest.mark.once
def test_greedy_continuation(model, wanted):
    written, prompt_length = wanted["greedy_token_ids"], int(wanted["greedy_prompt_length"])
    given = np.broadcast_to(np.arange(written.shape[1]) < prompt_length, written.shape)
    model.compile(sampler="greedy")
    prompt = {"token_ids": np.where(given, written, 0), "padding_mask": given}
    found = model.generate(prompt, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(found, written)


# {name in a block of the file: path in a block of the package}; vectors and matrices [out, in].
BLOCK = {
    "attn_norm": "temporal_norm/scale",
    **{f"attn.{name}_proj": f"temporal_block/{name}_proj/kernel" for name in "qfio"},
    **{f"attn.{name}_conv1d": f"temporal_block/{name}_conv1d/kernel" for name in "qfi"},
    "attn.g_norm": "temporal_block/norm/scale",
    "mlp_norm": "channel_norm/scale",
    **{f"mlp.{name}_proj": f"mlp/{name}_proj/kernel" for name in ("gate", "up", "down")},
}


def random_tensors(rng, width, inside, vocabulary, taps):
    """Tensors of two blocks and tied embeddings, as flash-linear-attention stores them."""

    def matrix(*shape):
        return rng.normal(size=shape) / np.sqrt(shape[-1])

    tensors = {
        "model.embeddings.weight": rng.normal(size=(vocabulary, width)),
        "model.lower_bounds": rng.normal(size=(2, width)),
        "model.norm.weight": rng.uniform(0.5, 1.5, width),
    }
    shapes = {"mlp.gate_proj": (inside, width), "mlp.up_proj": (inside, width)}
    shapes["mlp.down_proj"] = (width, inside)
    for i in range(2):
        for name in BLOCK:
            if "norm" in name:
                tensor = rng.uniform(0.5, 1.5, width)
            elif "conv1d" in name:
                tensor = matrix(width, 1, taps)
            else:
                tensor = matrix(*shapes.get(name, (width, width)))
            tensors[f"model.layers.{i}.{name}.weight"] = tensor
    return {name: tensor.astype("float32") for name, tensor in tensors.items()}


def numpy_logits(tensors, token_ids, expand_ratio):
    """float64 logits of the tensors of a file, by `tests.models.reference`."""
    tensors = {name: tensor.astype("float64") for name, tensor in tensors.items()}
    weights = {
        "token_embedding/embeddings": tensors["model.embeddings.weight"],
        "lower_bounds/logits": tensors["model.lower_bounds"],
        "final_norm/scale": tensors["model.norm.weight"],
    }
    for i in range(2):
        for theirs, ours in BLOCK.items():
            tensor = tensors[f"model.layers.{i}.{theirs}.weight"]
            # Transposed, a filter [channels, 1, taps] is [taps, 1, channels].
            weights[f"block_{i}/{ours}"] = tensor.T[:, 0] if tensor.ndim == 3 else tensor.T
    config = {
        "num_layers": 2,
        "expand_ratio": expand_ratio,
        "gate_activation": "silu",
        "input_activation": "linear",
        "tie_word_embeddings": True,
    }
    rows = [reference.document_logits("hgrn2", weights, config, row) for row in token_ids]
    return np.stack(rows)


@pytest.mark.once
def test_logits_with_short_convolutions(tmp_path):
    """Fails if a filter is loaded into another projection or with its taps reversed."""
    rng = np.random.default_rng(0)
    tensors = random_tensors(rng, width=8, inside=12, vocabulary=17, taps=3)
    config = CONFIG | {
        **{"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 12},
        **{"expand_ratio": 4, "num_heads": 2, "use_short_conv": True, "conv_size": 3},
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    token_ids = rng.integers(0, 17, (2, 9)).astype("int32")
    found = golden.logits(HGRN2CausalLM.from_preset(str(tmp_path)), token_ids)
    assert golden.relative(found, numpy_logits(tensors, token_ids, expand_ratio=4)) < SAME


def tensors_of(path):
    return load_file(path / "model.safetensors")


def assert_same_bits(found, wanted):
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.once
def test_a_round_trip_keeps_every_bit(model, tmp_path):
    model.export_to_transformers(tmp_path / "export")
    assert_same_bits(tensors_of(tmp_path / "export"), tensors_of(PATH))
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert {key: config[key] for key in config if key in CONFIG and key != "torch_dtype"} == {
        key: CONFIG[key] for key in CONFIG if key in config and key != "torch_dtype"
    }


@pytest.mark.once
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
def test_variants_come_back_as_they_were(variant, tmp_path):
    backbone = tiny_backbone(family="hgrn2", **variant)
    backbone.export_to_transformers(tmp_path / "export")
    tensors = tensors_of(tmp_path / "export")
    assert ("lm_head.weight" in tensors) != backbone.tie_word_embeddings
    assert ("model.lower_bounds" in tensors) == backbone.use_lower_bounds
    if backbone.conv_size:
        shape = tensors["model.layers.1.attn.f_conv1d.weight"].shape
        assert shape == (backbone.hidden_dim, 1, backbone.conv_size)
    again = HGRN2Backbone.from_preset(str(tmp_path / "export"))
    assert again.get_config() | {"name": ""} == backbone.get_config() | {"name": ""}
    for a, b in zip(again.get_weights(), backbone.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.once
def test_every_weight_has_its_tensor():
    for variant in ({}, {"conv_size": 3, "tie_word_embeddings": True}, {"num_layers": 1}, HYBRID):
        backbone = tiny_backbone(family="hgrn2", **variant)
        tensors = HGRN2Layout().tensors(backbone.get_config())
        shapes = {weight.path: tuple(weight.shape) for weight in backbone.weights}
        assert sorted(path for tensor in tensors for path in tensor.weights) == sorted(shapes)
        for tensor in tensors:
            values = tensor.transform.to_weights(np.zeros(tensor.shape))
            assert [value.shape for value in values] == [shapes[path] for path in tensor.weights]


@pytest.mark.once
def test_configurations():
    def arguments(**changes):
        config = {key: value for key, value in (CONFIG | changes).items() if value != "missing"}
        return HGRN2Layout().backbone_arguments(config, "config.json")

    assert arguments()["intermediate_dim"] == 96
    assert arguments()["conv_size"] is None
    assert arguments(use_short_conv=True)["conv_size"] == 4
    for width, inside in [(64, 256), (768, 2048), (1024, 2816), (2560, 6912)]:
        sizes = {"hidden_size": width, "intermediate_size": None}
        assert arguments(**sizes)["intermediate_dim"] == inside
    assert (
        arguments(hidden_size=768, intermediate_size=None, hidden_ratio=8)["intermediate_dim"]
        == 4096
    )
    # Heads by their size, which goes first, or by their number.
    assert arguments()["expand_ratio"] == 32
    assert arguments(expand_ratio=None)["expand_ratio"] == 32
    assert arguments(expand_ratio=16)["expand_ratio"] == 16
    assert arguments(expand_ratio="missing", num_heads="missing")["expand_ratio"] == 64
    assert arguments(fuse_norm=True, share_conv_kernel=True)["hidden_dim"] == 64
    for changes, key in [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_short_conv": True, "share_conv_kernel": True}, "share_conv_kernel"),
        ({"elementwise_affine": False}, "elementwise_affine"),
        ({"hidden_size": "missing"}, "hidden_size"),
        ({"rotary": True}, "rotary"),
        ({"expand_ratio": 48}, "expand_ratio"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers"),
        ({"norm_eps": float("inf")}, "norm_eps"),
    ]:
        with pytest.raises(ValueError, match=f"'{key}'"):
            arguments(**changes)


@pytest.mark.once
def test_configurations_of_hybrids():
    """Fails if a missing key has another default than in flash-linear-attention, or if a value is
    ignored that changes the model.
    """
    expected = {
        "attention_layers": (0, 2),
        "num_query_heads": 4,
        "num_key_value_heads": 4,
        "sliding_window": None,
        "rope_max_wavelength": 10_000.0,
        "use_qkv_bias": False,
    }

    def arguments(attn, **changes):
        config = CONFIG | {"num_hidden_layers": 4, "attn": attn} | changes
        found = HGRN2Layout().backbone_arguments(config, "config.json")
        return {name: found[name] for name in expected if name in found}

    one = {"layers": [2, 0], "num_heads": 4}
    assert arguments(None) == arguments([]) == {"attention_layers": ()}
    assert arguments(one) == arguments({**one, "window_size": None, "qk_norm": False}) == expected
    assert arguments([{**one, "layers": [2]}, {**one, "layers": [0]}]) == expected
    given = {"num_kv_heads": 2, "window_size": 7, "rope_theta": 500.0, "qkv_bias": True}
    assert list(arguments({**one, **given}).values()) == [(0, 2), 4, *given.values()]
    for changes, message in [
        ({"layers": [4]}, "'layers' is .* in 'attn' of config.json.* integers from 0 to 3"),
        ({"layers": []}, "'layers'"),
        ({"layers": [True]}, "'layers'"),
        ({"layers": [0, 0]}, "'attn' is .*each layer in one of them"),
        ({"num_heads": 3}, "'num_heads' is 3 .*'hidden_size', 64"),
        ({"num_heads": 64}, "'num_heads' is 64 .*heads of an even size"),
        ({"num_kv_heads": 3}, "'num_kv_heads' is 3 .*a divisor of 'num_heads', 4"),
        ({"window_size": 0}, "'window_size' is 0"),
        ({"qkv_bias": 1}, "'qkv_bias' is 1"),
        ({"sinks": 4}, "'attn' of config.json has 'sinks'"),
    ]:
        with pytest.raises(ValueError, match=message):
            arguments({**one, **changes})
    for attn, message in [
        ("all", "'attn' is 'all' .*an object or a list of objects"),
        ({"num_heads": 4}, "'attn' of config.json has no 'layers'"),
        ({"layers": [1]}, "'attn' of config.json has no 'num_heads'"),
        ([one, {**one, "layers": [1], "window_size": 8}], "'attn' .* differ only in 'layers'"),
    ]:
        with pytest.raises(ValueError, match=message):
            arguments(attn)
    with pytest.raises(ValueError, match="'attnres_block_size' is 4"):
        arguments(one, attnres_block_size=4)


@pytest.mark.once
def test_the_published_configurations_are_the_presets():
    """As the files on the Hub say it: by the size of heads, and no width inside."""
    for name, hidden_size, layers in [("1.3b", 2048, 24), ("2.7b", 2560, 32)]:
        config = CONFIG | {
            "hidden_size": hidden_size,
            "num_hidden_layers": layers,
            "expand_ratio": 128,
            "num_heads": hidden_size // 128,
            "intermediate_size": None,
            "vocab_size": 32000,
        }
        arguments = HGRN2Layout().backbone_arguments(config, "config.json")
        size = SIZES[f"hgrn2_{name}_100b"]
        preset = size.backbone_arguments
        assert {key: preset.get(key, arguments[key]) for key in arguments} == arguments
        tensors = HGRN2Layout().tensors(arguments)
        assert sum(int(np.prod(tensor.shape)) for tensor in tensors) == size.parameters


@pytest.mark.once
def test_what_the_layout_cannot_hold(tmp_path):
    unfit = {"gate_activation": "sigmoid", "input_activation": "silu", "layer_norm_epsilon": 0.0}
    backbone = tiny_backbone(family="hgrn2", num_layers=1, **unfit)
    with pytest.raises(ValueError, match="save_to_preset") as raised:
        backbone.export_to_transformers(tmp_path / "export")
    for name, value in unfit.items():
        assert f"`{name}` is {value!r}, and must be " in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.once
def test_bfloat16_loads_as_it_is(tmp_path):
    """Weights of 16 bits, but for the table of bounds."""
    backbone = HGRN2Backbone.from_preset(str(PATH), dtype="bfloat16")
    stored = {keras.backend.standardize_dtype(weight.dtype) for weight in backbone.weights}
    assert stored == {"bfloat16", "float32"}
    assert backbone.lower_bounds.logits.dtype == "float32"
    backbone.export_to_transformers(tmp_path / "export")
    for name, array in tensors_of(tmp_path / "export").items():
        assert array.dtype == "bfloat16", name
