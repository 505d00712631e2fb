"""Backbones: their logits, their inputs, their arguments, and the work of one decoding step."""

import functools
import importlib
import inspect
from unittest import mock

import keras
import numpy as np
import pytest

from tests.layers import table
from tests.layers.table import arguments_of, assert_rejects, numpy
from tests.models import reference
from tests.models.tiny import (
    FAMILIES,
    FEWER_LAYERS,
    HYBRID,
    VOCABULARY,
    any_family,
    shared_by_families,
    tiny_backbone,
    tiny_causal_lm,
)

LENGTH = 11


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def family_model(family):
    return tiny_causal_lm(family=family)


def tokens(batch=3):
    return np.random.default_rng(0).integers(3, VOCABULARY, (batch, LENGTH)).astype("int32")


assert_close = functools.partial(table.assert_close, rtol=1e-4, atol=1e-4)


def test_logits_match_the_reference_with_padding_anywhere_and_documents(family_model):
    """Weights and inputs are equal on every backend, so this also compares the backends."""
    token_ids = tokens()
    real = np.ones_like(token_ids)
    real[0, 7:] = 0  # padding at the end,
    real[1, :2] = 0  # at the beginning
    real[2, [3, 4, 8]] = 0  # and in the middle
    documents = np.array([[1] * 4 + [2] * 1 + [3] * 6, [1] * 11, [5] * 3 + [0] * 8], "int32")
    x = {"token_ids": token_ids, "padding_mask": real, "segment_ids": documents}
    logits = numpy(family_model.predict_on_batch(x))
    expected = reference.logits(family_model, token_ids, real, documents)
    assert_close(logits[real > 0], expected[real > 0])
    assert np.isfinite(logits).all()


@pytest.mark.once
def test_clones_and_functional_models_of_a_backbone_give_its_outputs(family_model):
    """A copy requires segments, or a functional model with segments mixes documents."""
    backbone = family_model.backbone
    x = {"token_ids": np.arange(6)[None], "padding_mask": np.ones((1, 6), "int32")}
    expected = numpy(backbone(x))
    clone = keras.models.clone_model(backbone)
    clone.set_weights(backbone.get_weights())
    functional = keras.Model(backbone.input, backbone.output)
    for model in (clone, functional):
        assert type(model) is not type(backbone)
        np.testing.assert_array_equal(numpy(model(x)), expected)
    np.testing.assert_array_equal(numpy(backbone({**x, "segment_ids": None})), expected)

    packed = {**x, "segment_ids": np.array([[1, 1, 2, 2, 2, 2]])}
    separated = numpy(backbone(packed))
    alone = backbone({name: array[:, 2:] for name, array in x.items()})
    assert_close(separated[:, 2:], alone, rtol=1e-5, atol=1e-5)
    assert np.abs(separated - expected).max() > 1e-2
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in packed}
    assert_close(keras.Model(inputs, backbone(inputs))(packed), separated, rtol=1e-5, atol=1e-5)


@pytest.mark.once
def test_outputs_carry_no_keras_mask():
    """Keras would rescale the loss by a mask that it finds on the logits."""
    token_ids, model = tokens(), tiny_causal_lm()
    x = {"token_ids": token_ids, "padding_mask": token_ids > 30}
    for output in (model(x), model.backbone(x)):
        assert getattr(output, "_keras_mask", None) is None


ATTENTION = {"num_layers": 2, "block_types": "global_attention"}
MAMBA_SCALES = (
    *("mamba_projection_scales", "query_scale", "embedding_scale", "output_scale"),
    *("mamba_scale", "attention_scale", "mlp_scale", "mlp_gate_scale"),
)
OPTIONS = {
    "griffin": {
        "no positions": {**ATTENTION, "partial_rotary_factor": 0.0},
        "whole heads": {**ATTENTION, "partial_rotary_factor": 1.0, "rope_max_wavelength": 100.0},
        "soft cap": {**ATTENTION, "embedding_scale": 3.0, "final_logit_soft_cap": 2.0},
        "complex recurrence": {"recurrence": "cg_lru", "num_layers": 2},
    },
    "hgrn2": {
        "short convolutions": {"conv_size": 3},
        "activations of the paper, tied": {
            **{"gate_activation": "sigmoid", "input_activation": "silu"},
            "tie_word_embeddings": True,
        },
        "no lower bounds": {"use_lower_bounds": False},
        "hybrid": {**HYBRID, "sliding_window": 3},
    },
    "transnormer": {
        "decays of the paper": {"decay_schedule": "paper"},
        "tied": {"tie_word_embeddings": True},
        "one layer": {"num_layers": 1},
    },
    # The row of `FAMILIES` has the options of MiniCPM-SALA alone.
    "lightning_hybrid": {
        "HypeNet": {
            **{"use_qk_norm": True, "attention_logit_scaling": 2.5, "tie_word_embeddings": True},
            **dict.fromkeys(("embedding_scale", "residual_scale", "output_scale")),
        },
    },
    "mamba_hybrid": {
        "Nemotron-H": {
            **dict.fromkeys(MAMBA_SCALES),
            "block_types": ("mlp", "mamba", "attention"),
            "mlp": "squared_relu",
            "rope_max_wavelength": None,
        },
        "MLPs after mixers": {"block_types": ("mamba", "attention"), "use_mlp": True},
        "no MLP, no norm": {"block_types": "mamba", "mamba_norm_position": None},
        "norm before the gate": {"mamba_norm_position": "before_gate", "num_layers": 1},
    },
    "lfm2": {
        "four taps, untied": {
            **{"conv_size": 4, "use_conv_bias": False, "tie_word_embeddings": False},
            "layer_norm_epsilon": 1e-2,
        },
    },
}
STREAMED = ("complex recurrence", "short convolutions", "hybrid", "Nemotron-H")


@pytest.mark.once
@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, options in OPTIONS.items() for name in options]
)
def test_options_with_padding_and_documents_match_the_reference(family, name):
    """A block has the bound of another one, or attention has wrong positions or documents."""
    model, token_ids = tiny_causal_lm(family=family, **OPTIONS[family][name]), tokens()
    real = np.ones_like(token_ids)
    real[0, [0, 4]] = 0
    segment_ids = np.array([[0] * LENGTH, [1] * 3 + [2] * (LENGTH - 3), [4] * LENGTH], "int32")
    x = {"token_ids": token_ids, "padding_mask": real, "segment_ids": segment_ids}
    expected = reference.logits(model, token_ids, real, segment_ids)
    assert_close(numpy(model.predict_on_batch(x))[real > 0], expected[real > 0])
    if name in STREAMED:
        assert_streams(model, token_ids[1:], reference.logits(model, token_ids[1:]))


def assert_streams(model, token_ids, expected):
    """Asserts the logits of parts of sequences, computed with a cache."""
    cache, logits = model.backbone.get_initial_state(len(token_ids), token_ids.shape[1]), []
    for part in (token_ids[:, :3], token_ids[:, 3:4], token_ids[:, 4:]):
        some, _, cache = model.call_with_cache(part, cache)
        logits.append(numpy(some))
    assert_close(np.concatenate(logits, axis=1), expected)


FINITE, NEEDED = "must be a finite number above 0", "is needed for the '{}' blocks"
INVALID_ARGUMENTS = {
    "griffin": [
        *(
            ("block_types", pattern, "must be a pattern of 'recurrent'")
            for pattern in (("attention",), ("recurrent", "linear_attention"), ())
        ),
        ("recurrence", "lru", "must be"),
        ("num_blocks", 7, ""),
        ("num_blocks", None, "must be an integer"),
        ("num_key_value_heads", 3, ""),
        ("partial_rotary_factor", 1.5, ""),
        ("lru_width", None, NEEDED.format("recurrent")),
        ("num_query_heads", None, NEEDED.format("local_attention")),
        ("sliding_window", None, NEEDED.format("local_attention")),
        *(
            (name, value, FINITE)
            for name in ("final_logit_soft_cap", "embedding_scale")
            for value in (0.0, -1.0, float("nan"), float("inf"), "30", True)
        ),
    ],
    "hgrn2": [
        ("expand_ratio", 5, ""),
        ("expand_ratio", None, "must be an integer"),
        ("attention_layers", (1, 1), r".*distinct integers from 0 to .*, 2; got \(1, 1\)"),
        ("attention_layers", (3,), r".*distinct integers .*got \(3,\)"),
        ("attention_layers", (-1,), r".*distinct integers .*got \(-1,\)"),
        ("attention_layers", (True,), r".*distinct integers .*got \(True,\)"),
        ("attention_layers", 1, ".*must be a tuple .*got 1"),
        ("num_query_heads", None, ".*is needed for the blocks with attention"),
        ("num_query_heads", 16, ".*must divide `hidden_dim`, 16, .* even size.*got 16"),
        ("num_key_value_heads", 3, ".*must divide `num_query_heads`"),
    ],
    "transnormer": [("decay_schedule", "slopes", 'must be "checkpoints", "alibi" or')],
    "lightning_hybrid": [
        ("block_types", (), "must be a pattern of 'lightning_attention', 'global_attention'"),
        ("block_types", ("attention",), r"must be .*got \('attention',\)"),
        *((name, -1.0, FINITE) for name in ("embedding_scale", "residual_scale", "output_scale")),
    ],
    "mamba_hybrid": [
        ("block_types", ("moe",), r"must be .*'mamba_and_attention'.*got \('moe',\)"),
        ("mlp", "relu2", "must be 'swiglu' or 'squared_relu'; got 'relu2'"),
        ("num_mamba_heads", None, "must be an integer"),
        ("num_query_heads", None, "must be an integer"),
        ("intermediate_dim", None, "must be an integer"),
        ("num_mamba_groups", 3, "must divide `num_mamba_heads`, 4; got 3"),
        *((name, -1.0, FINITE) for name in ("embedding_scale", "mlp_scale", "mamba_scale")),
    ],
    "lfm2": [
        ("block_types", ("conv",), "must be a pattern of 'gated_short_conv', 'global_att"),
        ("num_key_value_heads", 3, ".*must divide `num_query_heads`"),
        ("conv_size", 0, "must be an integer"),
        ("use_conv_bias", None, "must be True or False"),
    ],
}


@pytest.mark.once
@pytest.mark.parametrize(
    ("family", "name", "value", "match"),
    [(family, *case) for family, cases in INVALID_ARGUMENTS.items() for case in cases],
)
def test_backbone_rejects_invalid_arguments(family, name, value, match):
    cls, hybrid = FAMILIES[family], HYBRID if family == "hgrn2" else {}
    match = f"`{name}` ?{match}"
    assert_rejects(match, cls.backbone, **{**cls.sizes, **hybrid, name: value})


@pytest.mark.once
@any_family
def test_sizes_and_booleans_of_backbones_are_checked(family):
    cls, sizes = FAMILIES[family].backbone, FAMILIES[family].sizes
    sizes = {**sizes, **HYBRID} if family == "hgrn2" else sizes
    for name in arguments_of(cls, "size"):
        required = {"vocabulary_size", "num_layers", "hidden_dim", "intermediate_dim"}
        for value in (0, -1, "8", 1.5, *([None] if name in required else [])):
            match = f"`{name}` must be an integer, at least 1; got {value!r}"
            assert_rejects(match, cls, **{**sizes, name: value})
    for name in arguments_of(cls, "boolean"):
        for value in ("yes", 1, None):
            match = f"`{name}` must be True or False; got {value!r}"
            assert_rejects(match, cls, **{**sizes, name: value})


@pytest.mark.once
@any_family
def test_config_of_a_backbone_has_every_argument_and_restores_it(family):
    options = {"dtype": "mixed_bfloat16", "name": "one", "layer_norm_epsilon": 1e-5}
    backbone = tiny_backbone(family=family, **options)
    config = backbone.get_config()
    assert inspect.signature(type(backbone)).parameters.keys() <= config.keys()
    again = type(backbone).from_config(config)
    assert again.get_config() == config
    for layer in (*backbone._flatten_layers(), *again._flatten_layers()):
        if not isinstance(layer, keras.layers.InputLayer):
            assert layer.dtype_policy.name == "mixed_bfloat16", layer.path


@pytest.mark.once
def test_residual_block_from_config_streams_as_the_original(family, family_model):
    block = family_model.backbone.transformer_layers[-1]
    again = type(block).from_config(block.get_config())
    again.build((None, None, 16))
    for weight, value in zip(again.weights, block.get_weights(), strict=True):
        weight.assign(value)
    x = np.random.default_rng(0).normal(size=(2, 9, 16)).astype("float32")
    beta = np.linspace(0.1, 0.9, 16)
    call = {"lower_bound": np.log(np.stack([beta, 1 - beta]))} if family == "hgrn2" else {}
    state = again.get_initial_state(2, max_length=9)
    left, state = again(x[:, :4], initial_state=state, return_state=True, **call)
    right = again(x[:, 4:], initial_state=state, **call)
    assert_close(np.concatenate(numpy([left, right]), axis=1), block(x, **call), atol=1e-5)


@shared_by_families
def test_mixed_precision_computes_in_bfloat16_and_keeps_states_in_float32(family):
    # The second block of a Griffin has keys and values.
    sizes = {"num_layers": 2} if family == "griffin" else FEWER_LAYERS
    model = tiny_causal_lm(family=family, dtype="mixed_bfloat16", **sizes)
    token_ids = tokens()
    logits = model({"token_ids": token_ids, "padding_mask": token_ids > 0})
    assert keras.backend.standardize_dtype(logits.dtype) == "bfloat16"
    assert {weight.dtype for weight in model.weights} == {"float32"}
    expected = reference.logits(model, token_ids)
    error = numpy(keras.ops.cast(logits, "float32")) - expected
    assert np.sqrt((error**2).mean()) < 0.02 * np.sqrt((expected**2).mean())
    _, _, cache = model.call_with_cache(token_ids, model.backbone.get_initial_state(3, LENGTH))
    # Attention multiplies keys and values in bfloat16.
    dtypes = {"segment": "int32", "position": "int32", "key": "bfloat16", "value": "bfloat16"}
    for path, array in keras.tree.flatten_with_path(cache):
        dtype = keras.backend.standardize_dtype(array.dtype)
        assert dtype == dtypes.get(path[-1], "float32"), path


@pytest.mark.once
def test_layout_map_splits_every_large_weight(family, family_model):
    pytest.importorskip("jax")
    mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"), ["cpu:0"])
    get_layout_map = FAMILIES[family].backbone.get_layout_map
    layout = get_layout_map(mesh)
    others = tiny_backbone(recurrence="cg_lru").weights if family == "griffin" else []
    for weight in family_model.backbone.weights + others:
        axes = layout[weight.path]
        small = "bias" in weight.path or "lower_bounds" in weight.path
        if len(weight.shape) > 1 and not small:
            assert len(axes.axes) == len(weight.shape), weight.path
            assert "model" in axes.axes, weight.path
    assert_rejects("`model_parallel_dim_name`", get_layout_map, mesh, model_parallel_dim_name="x")


@pytest.mark.once
def test_hidden_states_analyzes_padding_and_documents_once(family, family_model, monkeypatch):
    """Each layer classifies the tokens of masks and segments, which eager calls repeat.

    Or positions of prompts without segments use a scan, whose Triton kernel compiles for 4 s.
    """
    # An `import` of these names would give the functions, not the modules.
    modules = [
        importlib.import_module(f"keras_recurrent.{name}")
        for name in ("ops.token_kind", "layers.tokens", "models.recurrent_backbone")
    ]
    backbone, mocks = family_model.backbone, {}
    names = "compute_tokens", "kinds_of_whole_sequences", "token_position", "last_segment"
    for name in (*names, "linear_scan"):
        for module in (module for module in modules if hasattr(module, name)):
            mocks.setdefault(name, mock.Mock(wraps=getattr(module, name)))
            monkeypatch.setattr(module, name, mocks[name])
    cache = backbone.get_initial_state(3, LENGTH)
    prompts = tokens(), tokens() > 4
    for before in (None, cache):
        for token_ids, *others in ((*prompts, tokens()), prompts, (tokens()[:, :1],)):
            for function in mocks.values():
                function.reset_mock()
            backbone.hidden_states(token_ids, *others, cache=before)
            counts = {name: function.call_count for name, function in mocks.items()}
            assert counts["compute_tokens"] == 1
            assert counts["token_position"] == (family != "hgrn2")
            assert counts["linear_scan"] == (family != "hgrn2" and len(others) == 2)
            assert counts["last_segment"] == (before is not None)
            if others or before:
                assert counts["kinds_of_whole_sequences"] == 1


@pytest.mark.once
def test_decoding_step_sorts_and_sums_no_tokens(family_model, monkeypatch):
    """A step of one token runs operations that only several tokens need."""
    backbone, token_ids = family_model.backbone, tokens()[:, :3]
    cache = backbone.get_initial_state(3, LENGTH)
    whole, _ = backbone.hidden_states(token_ids, cache=cache)

    def fail(*args, **kwargs):
        raise AssertionError("one token has no order")

    for name in ("argsort", "cumsum", "take_along_axis", "argmax"):
        monkeypatch.setattr(keras.ops, name, fail)
    for t in range(3):
        x, cache = backbone.hidden_states(token_ids[:, t : t + 1], cache=cache)
        assert_close(x[:, 0], whole[:, t], atol=1e-5)


@pytest.mark.skipif(keras.config.backend() != "torch", reason="JAX and TensorFlow compile a step")
def test_forward_pass_copies_no_python_numbers_to_the_device(family_model, monkeypatch):
    """The host waits for the GPU: a number that becomes a tensor is copied after all kernels."""
    import torch

    backbone = family_model.backbone
    names = ("token_ids", "padding_mask", "segment_ids")
    inputs = dict.fromkeys(names, keras.ops.ones((2, 9), "int32"))
    copied = []

    def record_copies(make):
        def recorded(value, *args, **kwargs):
            if not isinstance(value, torch.Tensor):
                copied.append(value)
            return make(value, *args, **kwargs)

        return recorded

    for name in ("as_tensor", "tensor"):
        monkeypatch.setattr(torch, name, record_copies(getattr(torch, name)))
    keras.ops.maximum(inputs["token_ids"], 0)
    assert copied == [0]  # Keras's operation copies the number
    backbone(inputs, training=True)
    _, cache = backbone.hidden_states(inputs["token_ids"], return_cache=True, max_length=32)
    backbone.hidden_states(inputs["token_ids"], cache=cache)
    assert copied == [0]


@pytest.mark.once
def test_hidden_states_without_cache_equal_those_from_the_initial_cache(family_model):
    """With padding on both sides, a sequence of padding, documents, and unused or no free slots."""
    backbone = family_model.backbone
    token_ids, length = tokens(), LENGTH
    mask = np.ones(token_ids.shape, "bool")
    mask[0, : length // 3] = mask[1, length // 2 :] = mask[2] = False
    segment_ids = np.repeat(np.arange(length) // 4, 3).reshape(length, 3).T
    for max_length in (LENGTH + 2, 3):
        for arguments in ((token_ids,), (token_ids, mask), (token_ids, mask, segment_ids)):
            cache = backbone.get_initial_state(3, max_length)
            expected = backbone.hidden_states(*arguments, cache=cache)
            found = backbone.hidden_states(*arguments, return_cache=True, max_length=max_length)
            table.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
            arrays = zip(keras.tree.flatten(found[1]), keras.tree.flatten(expected[1]), strict=True)
            assert all(a.dtype == b.dtype for a, b in arrays)


@pytest.mark.once
def test_hidden_states_that_return_a_cache_need_its_capacity():
    hidden_states = tiny_backbone().hidden_states  # a block attends to all tokens
    assert_rejects("max_length", hidden_states, tokens(), return_cache=True)
    match = "`max_length` must be"
    assert_rejects(match, hidden_states, tokens(), return_cache=True, max_length=0)
