"""What the network computes, and what it takes."""

import keras
import numpy as np
import pytest

from keras_recurrent.models import GriffinBackbone, GriffinResidualBlock
from tests.models import numpy_hawk
from tests.models.tiny import SIZES, VOCABULARY, forward, tiny_backbone, tiny_causal_lm, weights_of

LENGTH = 11


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm()


def tokens(batch=3, seed=0):
    return np.random.default_rng(seed).integers(3, VOCABULARY, (batch, LENGTH)).astype("int32")


def test_the_numbers_are_those_of_the_paper(model):
    """Weights and inputs are the same on every backend, so this also compares the backends."""
    token_ids = tokens()
    real = np.ones_like(token_ids)
    real[0, 7:] = 0  # padding at the end,
    real[1, :2] = 0  # at the beginning
    real[2, [3, 4, 8]] = 0  # and in the middle
    logits = forward(model, token_ids, real)
    wanted = numpy_hawk.logits(weights_of(model), token_ids, 2, real)
    np.testing.assert_allclose(logits[real > 0], wanted[real > 0], rtol=1e-4, atol=1e-4)
    assert np.isfinite(logits).all()


def test_packed_documents_know_nothing_of_each_other(model):
    token_ids = tokens()
    segment_ids = np.array([[1] * 4 + [2] * 1 + [3] * 6, [1] * 11, [5] * 3 + [0] * 6 + [0] * 2])
    real = np.ones_like(token_ids)
    real[2, 9:] = 0
    x = {"token_ids": token_ids, "padding_mask": real, "segment_ids": segment_ids.astype("int32")}
    packed = keras.ops.convert_to_numpy(model.predict_on_batch(x))
    wanted = numpy_hawk.logits(weights_of(model), token_ids, 2, real, segment_ids)
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


def test_nothing_of_the_mask_sticks_to_the_outputs(model):
    """Keras would rescale the loss by a mask that it finds on the logits."""
    token_ids = tokens()
    x = {"token_ids": token_ids, "padding_mask": token_ids > 30}
    for output in (model(x), model.backbone(x)):
        assert getattr(output, "_keras_mask", None) is None


def test_block_types_are_a_pattern_of_what_there_is():
    for pattern in [("local_attention",), ("recurrent", "global_attention"), ()]:
        with pytest.raises(ValueError, match="`block_types` must be a pattern of 'recurrent'"):
            GriffinBackbone(**{**SIZES, "block_types": pattern})
    backbone = GriffinBackbone(**{**SIZES, "num_layers": 3, "block_types": ["recurrent"] * 2})
    assert len(backbone.transformer_layers) == 3


def test_unknown_arguments_are_errors():
    with pytest.raises(TypeError, match="num_head"):
        GriffinBackbone(**SIZES, num_head=4)
    with pytest.raises(ValueError, match="num_blocks"):
        GriffinBackbone(**{**SIZES, "num_blocks": 7})


def test_the_configuration_makes_the_same_backbone():
    backbone = tiny_backbone(dtype="mixed_bfloat16", name="hawk", layer_norm_epsilon=1e-5)
    again = GriffinBackbone.from_config(backbone.get_config())
    assert again.get_config() == backbone.get_config()
    assert again.name == "hawk"
    assert again.dtype_policy.name == "mixed_bfloat16"
    assert [w.shape for w in again.weights] == [w.shape for w in backbone.weights]


def test_a_residual_block_serializes_and_streams():
    backbone = tiny_backbone(num_layers=1)
    block = backbone.transformer_layers[0]
    again = GriffinResidualBlock.from_config(block.get_config())
    again.build((None, None, 16))
    for weight, value in zip(again.weights, block.get_weights(), strict=True):
        weight.assign(value)
    x = np.random.default_rng(0).normal(size=(2, 9, 16)).astype("float32")
    whole = keras.ops.convert_to_numpy(block(x))
    left, state = again(x[:, :4], return_state=True)
    right = again(x[:, 4:], initial_state=state)
    parts = np.concatenate([keras.ops.convert_to_numpy(p) for p in (left, right)], axis=1)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5)


def test_mixed_precision_computes_in_bfloat16_and_remembers_in_float32():
    model = tiny_causal_lm(dtype="mixed_bfloat16")
    token_ids = tokens()
    x = {"token_ids": token_ids, "padding_mask": token_ids > 0}
    logits = model(x)
    assert keras.backend.standardize_dtype(logits.dtype) == "bfloat16"
    assert {weight.dtype for weight in model.weights} == {"float32"}
    wanted = numpy_hawk.logits(weights_of(model), token_ids, 2)
    error = keras.ops.convert_to_numpy(keras.ops.cast(logits, "float32")) - wanted
    assert np.sqrt((error**2).mean()) < 0.02 * np.sqrt((wanted**2).mean())
    _, _, cache = model.call_with_cache(token_ids, model.backbone.get_initial_state(3))
    floats = [a for a in keras.tree.flatten(cache) if "int" not in str(a.dtype)]
    assert {keras.backend.standardize_dtype(a.dtype) for a in floats} == {"float32"}


def test_the_layout_map_covers_the_large_weights(model):
    pytest.importorskip("jax")
    mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"), ["cpu:0"])
    layout = GriffinBackbone.get_layout_map(mesh)
    for weight in model.weights:
        axes = layout[weight.path]
        if len(weight.shape) > 1 and "bias" not in weight.path:
            assert len(axes.axes) == len(weight.shape), weight.path
            assert "model" in axes.axes, weight.path
    with pytest.raises(ValueError, match="`model_parallel_dim_name`"):
        GriffinBackbone.get_layout_map(mesh, model_parallel_dim_name="heads")
