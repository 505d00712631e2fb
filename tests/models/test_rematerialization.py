"""`keras.RematScope`: the backward pass recomputes blocks with unchanged results."""

import functools

import keras
import numpy as np
import pytest

from keras_recurrent.layers import HGRN2, RecurrentBlock
from keras_recurrent.layers.gated_linear_unit import SwiGLU
from tests.models.tiny import FEWER_LAYERS, VOCABULARY, any_family, tiny_causal_lm, two_families

BACKEND = keras.config.backend()


def model_in(mode, **kwargs):
    with keras.RematScope(mode=mode):
        return tiny_causal_lm(**kwargs)


def batch(length):
    rng = np.random.default_rng(0)
    token_ids = rng.integers(3, VOCABULARY, (2, length + 1)).astype("int32")
    segment_ids = np.repeat([[0, 1]], length // 2, axis=1).repeat(2, axis=0).astype("int32")
    real = np.ones((2, length), "int32")
    real[0, -3:] = 0
    x = {"token_ids": token_ids[:, :-1], "padding_mask": real, "segment_ids": segment_ids}
    return x, token_ids[:, 1:]


def training_step(mode, dtype, family="griffin", **kwargs):
    return update_of_weights(model_in(mode, dtype=dtype, family=family, **kwargs))


def update_of_weights(model):
    """Returns the changes of all weights in one training step, as one vector."""
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(0.1))
    model.train_on_batch(*batch(length=8))
    steps = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
    return np.concatenate([step.ravel() for step in steps])


@two_families
def test_training_step_with_recomputation_equals_a_plain_step(family):
    steps = (training_step(mode, "float32", family, **FEWER_LAYERS) for mode in (None, "full"))
    plain, recomputed = steps
    assert np.linalg.norm(recomputed - plain) < 1e-5 * np.linalg.norm(plain)


def test_remat_scope_selects_blocks_by_name():
    with keras.RematScope(mode="list_of_layers", layer_names=["block_1"]):
        model = tiny_causal_lm()
    blocks = model.backbone.transformer_layers
    plain = [block.rematerialized_call(block.call) == block.call for block in blocks]
    assert plain == [True, False, True]
    assert model.rematerialized_call(model.call) == model.call


@pytest.mark.nightly
@any_family
def test_remat_scope_selects_sublayers_of_blocks_by_name(family):
    # Layers of Keras cannot be recomputed in a TensorFlow graph, which rejects keyword arguments.
    names = ["mlp"] if BACKEND == "tensorflow" else ["mlp", "down_proj"]
    with keras.RematScope(mode="list_of_layers", layer_names=names):
        model = tiny_causal_lm(family=family)
    recomputed = {
        layer.name
        for layer in model.backbone._flatten_layers(include_self=False)
        if layer.rematerialized_call(layer.call) != layer.call
    }
    assert recomputed == set(names)
    expected = training_step(None, "float32", family)
    with keras.RematScope(mode="list_of_layers", layer_names=names):
        found = update_of_weights(tiny_causal_lm(family=family, dtype="float32"))
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.nightly
@any_family
def test_sublayers_of_a_recomputed_block_are_not_recomputed_again(family):
    model = model_in("full", family=family)
    modes = {
        layer.name: layer._remat_mode.mode if layer._remat_mode else None
        for layer in model.backbone.transformer_layers[0]._flatten_layers(include_self=False)
    }
    assert set(modes.values()) == {None}, modes


LAYERS = {"RecurrentBlock": lambda: RecurrentBlock(16), "HGRN2": lambda: HGRN2(expand_ratio=4)}


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND != "torch", reason="a compiler of torch")
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_compiled_torch_step_with_recomputation_equals_a_plain_step(layer, monkeypatch):
    """Backward passes of recomputed layers run outside of the compiled graphs."""
    import torch

    # The C++ compiler of Inductor takes a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    x = np.random.default_rng(0).normal(size=(2, 8, 16)).astype("float32")
    losses, weights = [], None
    for compiled in (False, True):
        with keras.RematScope(mode="full"):
            model = keras.Sequential([layer(), SwiGLU(8)])
        model.build(x.shape)
        weights = weights or model.get_weights()
        model.set_weights(weights)
        model.compile("sgd", "mse", jit_compile=compiled)
        losses.append([model.train_on_batch(x, x) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][2] < losses[0][0]


@pytest.mark.nightly
def test_generation_is_unchanged_by_a_remat_scope():
    plain, recomputing = tiny_causal_lm(num_layers=2), model_in("full", num_layers=2)
    token_ids = np.array([[5, 7, 9, 0, 0, 0], [8, 0, 0, 0, 0, 0]], "int32")
    prompt = {"token_ids": token_ids, "padding_mask": token_ids > 0}
    generated = []
    for model in (plain, recomputing):
        model.compile(sampler="greedy")
        generated.append(model.generate(dict(prompt), stop_token_ids=None)["token_ids"])
    np.testing.assert_array_equal(*generated)


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND != "torch", reason="torch reports which tensors it saves")
@any_family
def test_recomputation_saves_less_for_the_backward_pass(family):
    import torch

    sizes = []
    for mode in (None, "full"):
        model, saved = model_in(mode, num_layers=4, family=family), {}

        def pack(tensor, saved=saved):
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(batch(length=512)[0])
        sizes.append(sum(saved.values()))
    assert sizes[1] < 0.2 * sizes[0]
