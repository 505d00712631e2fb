"""`keras.RematScope`: blocks are recomputed in the backward pass, with unchanged results."""

import functools

import keras
import numpy as np
import pytest

from keras_recurrent.layers import HGRN2, RecurrentBlock
from keras_recurrent.layers.gated_linear_unit import SwiGLU
from tests.models.tiny import VOCABULARY, any_family, shared_by_families, tiny_causal_lm

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
    """All that one step adds to the weights, as one vector."""
    return training_step_of(model_in(mode, dtype=dtype, family=family, **kwargs))


def training_step_of(model):
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(0.1))
    model.train_on_batch(*batch(length=8))
    steps = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
    return np.concatenate([step.ravel() for step in steps])


@shared_by_families
def test_a_training_step_is_the_same(family):
    plain, recomputed = (training_step(mode, "float32", family) for mode in (None, "full"))
    assert np.linalg.norm(recomputed - plain) < 1e-5 * np.linalg.norm(plain)


@pytest.mark.nightly
def test_a_training_step_in_bfloat16_is_as_exact():
    """XLA rounds the two programs in different places: each is compared with float32."""
    exact = training_step(None, "float32", num_layers=2)
    plain, recomputed = (
        np.linalg.norm(training_step(mode, "mixed_bfloat16", num_layers=2) - exact)
        for mode in (None, "full")
    )
    assert recomputed < 2 * plain < 0.1 * np.linalg.norm(exact)


def test_the_scope_chooses_blocks_by_name():
    with keras.RematScope(mode="list_of_layers", layer_names=["block_1"]):
        model = tiny_causal_lm()
    blocks = model.backbone.transformer_layers
    plain = [block.rematerialized_call(block.call) == block.call for block in blocks]
    assert plain == [True, False, True]
    assert model.rematerialized_call(model.call) == model.call


@pytest.mark.nightly
@any_family
def test_the_scope_may_name_what_is_inside_of_blocks(family):
    # Keras's own layers cannot be recomputed in a graph of TensorFlow, which refuses keywords.
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
        found = training_step_of(tiny_causal_lm(family=family, dtype="float32"))
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.nightly
@any_family
def test_nothing_inside_a_block_recomputes_by_itself(family):
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
def test_with_the_compiler_of_torch(layer, monkeypatch):
    """It runs backwards of what is computed again outside of its graphs."""
    import torch

    # Up to the C++ of Inductor, which takes a minute.
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
def test_generation_and_scores_go_on():
    plain, recomputing = tiny_causal_lm(num_layers=2), model_in("full", num_layers=2)
    token_ids = np.array([[5, 7, 9, 0, 0, 0], [8, 0, 0, 0, 0, 0]], "int32")
    prompt = {"token_ids": token_ids, "padding_mask": token_ids > 0}
    written = []
    for model in (plain, recomputing):
        model.compile(sampler="greedy")
        written.append(model.generate(dict(prompt), stop_token_ids=None)["token_ids"])
    np.testing.assert_array_equal(*written)


def held_between_passes(model, x, y):
    """Bytes that the forward pass leaves for the backward pass."""
    if BACKEND == "jax":
        import jax

        def loss(weights):
            logits, _ = model.stateless_call(weights, [], x)
            return keras.ops.mean(
                keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            )

        def held(weights):
            return jax.vjp(loss, weights)[1]

        # Not the memory of a compiled step: XLA makes one of equal computations on a CPU.
        leaves = jax.tree.leaves(jax.eval_shape(held, [w.value for w in model.trainable_variables]))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    import torch

    held = {}

    def pack(tensor):
        held[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(held.values())


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow does not tell what it holds")
@any_family
def test_less_is_held_between_forward_and_backward_pass(family):
    x, y = batch(length=512)
    plain, recomputing = (
        held_between_passes(model_in(mode, num_layers=4, family=family), x, y)
        for mode in (None, "full")
    )
    assert recomputing < 0.2 * plain
