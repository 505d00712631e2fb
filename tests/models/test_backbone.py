"""Backbones: their logits, their inputs, and the work of one decoding step."""

import collections
import importlib

import keras
import numpy as np
import pytest

from keras_recurrent.models import GriffinBackbone
from tests.models import numpy_griffin
from tests.models.tiny import (
    FAMILIES,
    FEWER_LAYERS,
    SIZES,
    VOCABULARY,
    any_family,
    forward,
    shared_by_families,
    tiny_backbone,
    tiny_causal_lm,
)

LENGTH = 11


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm()


@pytest.fixture(scope="module", params=FAMILIES)
def model_and_reference(request):
    """A model of each family, and its logits in NumPy."""
    reference = importlib.import_module(f"tests.models.numpy_{request.param}")
    return tiny_causal_lm(family=request.param), reference.logits


def as_numpy(x):
    return keras.ops.convert_to_numpy(x)


def tokens(batch=3, seed=0):
    return np.random.default_rng(seed).integers(3, VOCABULARY, (batch, LENGTH)).astype("int32")


def test_the_numbers_are_those_of_the_paper(model_and_reference):
    """Weights and inputs are the same on every backend, so this also compares the backends."""
    model, reference = model_and_reference
    token_ids = tokens()
    real = np.ones_like(token_ids)
    real[0, 7:] = 0  # padding at the end,
    real[1, :2] = 0  # at the beginning
    real[2, [3, 4, 8]] = 0  # and in the middle
    logits = forward(model, token_ids, real)
    wanted = reference(model, token_ids, real)
    np.testing.assert_allclose(logits[real > 0], wanted[real > 0], rtol=1e-4, atol=1e-4)
    assert np.isfinite(logits).all()


def test_packed_documents_know_nothing_of_each_other(model_and_reference):
    model, reference = model_and_reference
    token_ids = tokens()
    segment_ids = np.array([[1] * 4 + [2] * 1 + [3] * 6, [1] * 11, [5] * 3 + [0] * 6 + [0] * 2])
    real = np.ones_like(token_ids)
    real[2, 9:] = 0
    x = {"token_ids": token_ids, "padding_mask": real, "segment_ids": segment_ids.astype("int32")}
    packed = keras.ops.convert_to_numpy(model.predict_on_batch(x))
    wanted = reference(model, token_ids, real, segment_ids)
    np.testing.assert_allclose(packed[real > 0], wanted[real > 0], rtol=1e-4, atol=1e-4)
    alone = forward(model, np.tile(token_ids[:1, 5:], (3, 1)), np.ones((3, 6)))
    np.testing.assert_allclose(packed[0, 5:], alone[0], rtol=1e-4, atol=1e-4)


def test_a_plain_call_takes_arrays_tensors_and_symbols(model):
    token_ids = tokens()
    arrays = {"token_ids": token_ids, "padding_mask": token_ids > 0}
    tensors = {key: keras.ops.convert_to_tensor(array) for key, array in arrays.items()}
    inputs = {key: keras.Input((LENGTH,), dtype="int32", name=key) for key in arrays}
    around = keras.Model(inputs, model(inputs))
    wanted = forward(model, token_ids, token_ids > 0)
    for logits in (model(arrays), model(inputs=tensors), around(tensors)):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(logits), wanted, rtol=1e-4, atol=1e-4)
    assert model.output.shape == (None, None, VOCABULARY)


@pytest.mark.once
@any_family
def test_what_is_made_of_the_graph_takes_what_a_preprocessor_makes(family):
    backbone = tiny_backbone(family=family)
    x = {"token_ids": np.arange(6)[None], "padding_mask": np.ones((1, 6), "int32")}
    wanted = as_numpy(backbone(x))
    clone = keras.models.clone_model(backbone)
    clone.set_weights(backbone.get_weights())
    part = keras.Model(backbone.input, backbone.output)
    for model in (clone, part):
        assert type(model) is not type(backbone)
        np.testing.assert_array_equal(as_numpy(model(x)), wanted)
    np.testing.assert_array_equal(as_numpy(backbone({**x, "segment_ids": None})), wanted)


@pytest.mark.once
@any_family
def test_segments_go_through_a_graph_that_asks_for_them(family):
    backbone = tiny_backbone(family=family)
    x = {"token_ids": np.arange(6)[None], "padding_mask": np.ones((1, 6), "int32")}
    packed = {**x, "segment_ids": np.array([[1, 1, 2, 2, 2, 2]])}
    wanted = as_numpy(backbone(packed))
    alone = as_numpy(backbone({name: array[:, 2:] for name, array in x.items()}))
    np.testing.assert_allclose(wanted[:, 2:], alone, rtol=1e-5, atol=1e-5)
    assert np.abs(wanted - as_numpy(backbone(x))).max() > 1e-2
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in packed}
    model = keras.Model(inputs, backbone(inputs))
    np.testing.assert_allclose(as_numpy(model(packed)), wanted, rtol=1e-5, atol=1e-5)


def test_nothing_of_the_mask_sticks_to_the_outputs(model):
    """Keras would rescale the loss by a mask that it finds on the logits."""
    token_ids = tokens()
    x = {"token_ids": token_ids, "padding_mask": token_ids > 30}
    for output in (model(x), model.backbone(x)):
        assert getattr(output, "_keras_mask", None) is None


def test_positions_scales_and_caps_are_those_of_the_paper_and_of_recurrentgemma():
    """NoPE and rotary positions on whole heads, and what RecurrentGemma computes differently."""
    for kwargs in (
        {"partial_rotary_factor": 0.0},
        {"partial_rotary_factor": 1.0, "rope_max_wavelength": 100.0},
        {"embedding_scale": 3.0, "final_logit_soft_cap": 2.0},
    ):
        model = tiny_causal_lm(num_layers=2, block_types=("global_attention",), **kwargs)
        token_ids = tokens()
        logits = forward(model, token_ids, np.ones_like(token_ids))
        wanted = numpy_griffin.logits(model, token_ids)
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)


def test_the_complex_recurrence():
    """`recurrence="cg_lru"` in whole texts, in parts and written to a configuration."""
    model = tiny_causal_lm(recurrence="cg_lru", **{"num_layers": 2, **FEWER_LAYERS})
    token_ids = tokens()
    wanted = numpy_griffin.logits(model, token_ids)
    logits = forward(model, token_ids, np.ones_like(token_ids))
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
    cache, parts = model.backbone.get_initial_state(len(token_ids), LENGTH), []
    for part in (token_ids[:, :3], token_ids[:, 3:4], token_ids[:, 4:]):
        logits, _, cache = model.call_with_cache(part, cache)
        parts.append(keras.ops.convert_to_numpy(logits))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), wanted, rtol=1e-4, atol=1e-4)
    assert "cg_lru" in cache["blocks"][0]["temporal_block"]
    again = GriffinBackbone.from_config(model.backbone.get_config())
    assert [w.path for w in again.weights] == [w.path for w in model.backbone.weights]
    with pytest.raises(ValueError, match="`recurrence` must be"):
        GriffinBackbone(**{**SIZES, "recurrence": "lru"})


@pytest.mark.once
def test_block_types_are_a_pattern_of_what_there_is():
    for pattern in [("attention",), ("recurrent", "linear_attention"), ()]:
        with pytest.raises(ValueError, match="`block_types` must be a pattern of 'recurrent'"):
            GriffinBackbone(**{**SIZES, "block_types": pattern})
    for pattern in (["recurrent"] * 2, "recurrent"):
        backbone = GriffinBackbone(**{**SIZES, "num_layers": 3, "block_types": pattern})
        assert set(backbone.block_types) == {"recurrent"}
        assert len(backbone.transformer_layers) == 3


@pytest.mark.once
def test_blocks_ask_for_what_they_need_and_for_nothing_else():
    for block_type, name in [
        ("recurrent", "lru_width"),
        ("local_attention", "num_query_heads"),
        ("local_attention", "sliding_window"),
        ("global_attention", "num_query_heads"),
    ]:
        sizes = {**SIZES, "num_layers": 1, "block_types": (block_type,)}
        del sizes[name]
        with pytest.raises(ValueError, match=f"`{name}` is needed for the '{block_type}' blocks"):
            GriffinBackbone(**sizes)
    of_attention = ("num_query_heads", "num_key_value_heads", "head_dim", "sliding_window")
    hawk = {key: size for key, size in SIZES.items() if key not in of_attention}
    assert GriffinBackbone(**{**hawk, "num_layers": 1}).num_query_heads is None
    transformer = {**SIZES, "lru_width": None, "sliding_window": None, "num_layers": 1}
    assert GriffinBackbone(**{**transformer, "block_types": ("global_attention",)}).built


@pytest.mark.once
def test_unknown_and_bad_arguments_are_errors():
    with pytest.raises(TypeError, match="num_head"):
        GriffinBackbone(**SIZES, num_head=4)
    for name, value in [
        ("num_blocks", 7),
        ("num_key_value_heads", 3),
        ("sliding_window", 0),
        ("partial_rotary_factor", 1.5),
    ]:
        with pytest.raises(ValueError, match=f"`{name}`"):
            GriffinBackbone(**{**SIZES, name: value})


@pytest.mark.once
@any_family
def test_sizes_are_integers_from_1_on(family):
    for name in ("vocabulary_size", "num_layers", "hidden_dim", "intermediate_dim"):
        for value in (0, -1, "8", 1.5, None):
            with pytest.raises(ValueError, match=f"`{name}` must be an integer, at least 1"):
                tiny_backbone(family=family, **{name: value})
    for value in (0.0, -1.0, float("nan"), float("inf"), "30", True):
        for name in ("final_logit_soft_cap", "embedding_scale"):
            with pytest.raises(ValueError, match=f"`{name}` must be a finite number above 0"):
                GriffinBackbone(**{**SIZES, name: value})


@pytest.mark.once
def test_truth_values_are_booleans():
    for family, names in {
        "griffin": ("scale_first_input",),
        "hgrn2": ("use_lower_bounds", "tie_word_embeddings"),
        "transnormer": ("tie_word_embeddings",),
        "lightning_hybrid": ("tie_word_embeddings", "use_qk_norm"),
    }.items():
        for name in names:
            for value in ("yes", 1, None):
                with pytest.raises(ValueError, match=f"`{name}` must be True or False; got"):
                    tiny_backbone(family=family, **{name: value})
    cls = FAMILIES["griffin"]
    for name in ("packed", "add_start_token", "add_end_token"):
        with pytest.raises(ValueError, match=f"`{name}` must be True or False; got 'no'"):
            cls.preprocessor(cls.tokenizer(), **{name: "no"})


@pytest.mark.once
@any_family
def test_the_configuration_makes_the_same_backbone(family):
    others = {
        "griffin": {"a_initializer": "zeros"},
        "hgrn2": {"conv_size": 2, "tie_word_embeddings": True},
        "transnormer": {"decay_schedule": "paper", "tie_word_embeddings": True},
        "lightning_hybrid": {"attention_logit_scaling": 9, "dense_length": 64},
    }
    backbone = tiny_backbone(
        family=family,
        dtype="mixed_bfloat16",
        name="one",
        layer_norm_epsilon=1e-5,
        **others.get(family, {}),
    )
    again = type(backbone).from_config(backbone.get_config())
    assert again.get_config() == backbone.get_config()
    assert again.name == "one"
    assert again.dtype_policy.name == "mixed_bfloat16"
    assert [w.shape for w in again.weights] == [w.shape for w in backbone.weights]


@pytest.mark.once
@shared_by_families
def test_a_residual_block_serializes_and_streams(family):
    backbone = tiny_backbone(family=family, num_layers=1)
    block = backbone.transformer_layers[0]
    again = type(block).from_config(block.get_config())
    again.build((None, None, 16))
    for weight, value in zip(again.weights, block.get_weights(), strict=True):
        weight.assign(value)
    x = np.random.default_rng(0).normal(size=(2, 9, 16)).astype("float32")
    whole = keras.ops.convert_to_numpy(block(x))
    left, state = again(x[:, :4], return_state=True)
    right = again(x[:, 4:], initial_state=state)
    parts = np.concatenate([keras.ops.convert_to_numpy(p) for p in (left, right)], axis=1)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5)


@any_family
def test_mixed_precision_computes_in_bfloat16_and_remembers_in_float32(family):
    model = tiny_causal_lm(family=family, dtype="mixed_bfloat16")
    token_ids = tokens()
    x = {"token_ids": token_ids, "padding_mask": token_ids > 0}
    logits = model(x)
    assert keras.backend.standardize_dtype(logits.dtype) == "bfloat16"
    assert {weight.dtype for weight in model.weights} == {"float32"}
    wanted = importlib.import_module(f"tests.models.numpy_{family}").logits(model, token_ids)
    error = keras.ops.convert_to_numpy(keras.ops.cast(logits, "float32")) - wanted
    assert np.sqrt((error**2).mean()) < 0.02 * np.sqrt((wanted**2).mean())
    _, _, cache = model.call_with_cache(token_ids, model.backbone.get_initial_state(3, LENGTH))
    exceptions = {"segment": "int32", "position": "int32"}
    exceptions |= {"key": "bfloat16", "value": "bfloat16"}  # what attention computes with
    for path, array in keras.tree.flatten_with_path(cache):
        dtype = keras.backend.standardize_dtype(array.dtype)
        assert dtype == exceptions.get(path[-1], "float32"), path


@pytest.mark.once
@any_family
def test_policies_reach_all_sublayers(family):
    backbone = tiny_backbone(family=family, dtype="mixed_bfloat16")
    for layer in backbone._flatten_layers():
        if not isinstance(layer, keras.layers.InputLayer):
            assert layer.dtype_policy.name == "mixed_bfloat16", layer.path


@pytest.mark.once
@any_family
def test_the_layout_map_covers_the_large_weights(family):
    pytest.importorskip("jax")
    mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"), ["cpu:0"])
    layout = FAMILIES[family].backbone.get_layout_map(mesh)
    others = tiny_backbone(recurrence="cg_lru").weights if family == "griffin" else []
    for weight in tiny_backbone(family=family).weights + others:
        axes = layout[weight.path]
        small = "bias" in weight.path or "lower_bounds" in weight.path
        if len(weight.shape) > 1 and not small:
            assert len(axes.axes) == len(weight.shape), weight.path
            assert "model" in axes.axes, weight.path
    with pytest.raises(ValueError, match="`model_parallel_dim_name`"):
        FAMILIES[family].backbone.get_layout_map(mesh, model_parallel_dim_name="heads")


@shared_by_families
def test_tokens_are_found_once(family, monkeypatch):
    """With masks and segments it is a sort of each row, which no compiler spares in eager calls."""
    # Not by `import`, which gives the function of that name.
    modules = [
        importlib.import_module(f"keras_recurrent.{name}")
        for name in ("ops.token_kind", "layers.tokens", "models.recurrent_backbone")
    ]
    backbone, counts = tiny_backbone(family=family), collections.Counter()
    for name in ("find_tokens", "kinds_of_whole_sequences", "token_position", "last_segment"):
        for module in modules:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted(counts, getattr(module, name)))
    cache = backbone.get_initial_state(3, LENGTH)
    uses_position = family != "hgrn2"
    for before in (None, cache):
        for token_ids, *others in ((tokens(), tokens() > 4, tokens()), (tokens()[:, :1],)):
            counts.clear()
            backbone.hidden_states(token_ids, *others, cache=before)
            assert counts["find_tokens"] == 1
            assert counts["token_position"] == uses_position
            assert counts["last_segment"] == (before is not None)
            if others or before:
                assert counts["kinds_of_whole_sequences"] == 1


def counted(counts, function):
    def counting(*args, **kwargs):
        counts[function.__name__] += 1
        return function(*args, **kwargs)

    return counting


@any_family
def test_a_cache_says_once_where_its_rows_are(family):
    cache = tiny_backbone(family=family).get_initial_state(3, LENGTH)
    paths = [path for path, _ in keras.tree.flatten_with_path(cache)]
    places = [path for path in paths if path[-1] in ("segment", "position")]
    assert places == [("segment",)] if family == "hgrn2" else [("position",), ("segment",)]


@any_family
def test_the_next_token_needs_no_look_at_its_row(family, monkeypatch):
    """One comparison tells whether a token is the first; nothing is sorted or summed for it."""
    backbone, token_ids = tiny_backbone(family=family), tokens()[:, :3]
    cache = backbone.get_initial_state(3, LENGTH)
    whole, _ = backbone.hidden_states(token_ids, cache=cache)

    def refuse(*args, **kwargs):
        raise AssertionError("one token has no order")

    for name in ("argsort", "cumsum", "take_along_axis", "argmax"):
        monkeypatch.setattr(keras.ops, name, refuse)
    for t in range(3):
        x, cache = backbone.hidden_states(token_ids[:, t : t + 1], cache=cache)
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(x)[:, 0],
            keras.ops.convert_to_numpy(whole)[:, t],
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.skipif(keras.config.backend() != "torch", reason="JAX and TensorFlow compile a step")
@any_family
def test_a_forward_pass_does_not_wait_for_the_gpu(family, monkeypatch):
    """A number that becomes a tensor is copied when all that the GPU has to do is done."""
    import torch

    backbone = tiny_backbone(family=family)
    token_ids = np.ones((2, 9), "int32")
    inputs = {
        name: keras.ops.convert_to_tensor(token_ids)
        for name in ("token_ids", "padding_mask", "segment_ids")
    }
    made = []
    for name in ("as_tensor", "tensor"):
        make = getattr(torch, name)

        def of(value, *args, make=make, **kwargs):
            if not isinstance(value, torch.Tensor):
                made.append(value)
            return make(value, *args, **kwargs)

        monkeypatch.setattr(torch, name, of)
    keras.ops.maximum(inputs["token_ids"], 0)
    assert made == [0]  # as Keras does it, which is what layers must do without
    backbone(inputs, training=True)
    assert made == [0]
    _, cache = backbone.hidden_states(inputs["token_ids"], return_cache=True, max_length=32)
    backbone.hidden_states(inputs["token_ids"], cache=cache)
    assert made == [0]


@shared_by_families
def test_a_cache_of_no_state_is_that_of_the_initial_state(family):
    """With padding on both sides, a sequence of padding, documents, and slots left over or not."""
    backbone = tiny_backbone(family=family, **FEWER_LAYERS)
    token_ids, length = tokens(), LENGTH
    mask = np.ones(token_ids.shape, "bool")
    mask[0, : length // 3] = mask[1, length // 2 :] = mask[2] = False
    segment_ids = np.repeat(np.arange(length) // 4, 3).reshape(length, 3).T
    for max_length in (LENGTH + 2, 3):
        for given in ((), (mask,), (mask, segment_ids)):
            cache = backbone.get_initial_state(3, max_length)
            expected = backbone.hidden_states(token_ids, *given, cache=cache)
            found = backbone.hidden_states(
                token_ids, *given, return_cache=True, max_length=max_length
            )
            keras.tree.assert_same_structure(found, expected)
            pairs = zip(keras.tree.flatten(found[1]), keras.tree.flatten(expected[1]), strict=True)
            for array, wanted in pairs:
                assert array.dtype == wanted.dtype
                np.testing.assert_allclose(
                    *map(keras.ops.convert_to_numpy, (array, wanted)), rtol=1e-4, atol=1e-5
                )


@pytest.mark.once
def test_a_cache_of_no_state_needs_a_capacity():
    backbone = tiny_backbone()  # a block attends to all tokens
    with pytest.raises(ValueError, match="max_length"):
        backbone.hidden_states(tokens(), return_cache=True)
    with pytest.raises(ValueError, match="`max_length` must be"):
        backbone.hidden_states(tokens(), return_cache=True, max_length=0)
