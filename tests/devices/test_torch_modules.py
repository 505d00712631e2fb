"""Models as modules of torch, in one process."""

import keras
import numpy as np
import pytest

from keras_recurrent.devices import torch_processes
from tests.models.tiny import any_family, tiny_causal_lm

if keras.config.backend() != "torch":
    pytest.skip("modules of torch", allow_module_level=True)

import torch

from keras_recurrent.devices.torch_modules import TorchModule

X = {"token_ids": np.arange(10).reshape(2, 5), "padding_mask": np.ones((2, 5), "int32")}


@any_family
def test_a_model_has_its_weights_for_parameters(family):
    model = tiny_causal_lm(family=family)
    for whole in (model, model.backbone):
        assert {id(p) for p in whole.parameters()} == {id(v.value) for v in whole.weights}
    model.backbone.enable_lora(2)
    for whole in (model, model.backbone):
        assert {id(p) for p in whole.parameters()} == {id(v.value) for v in whole.weights}


@any_family
def test_a_module_has_the_weights_of_its_model_and_computes_by_its_own(family):
    model = tiny_causal_lm(family=family)
    wanted = model(X)
    module = TorchModule(model)
    parameters = dict(module.named_parameters())
    assert {id(p) for p in parameters.values()} == {id(v.value) for v in model.weights}
    assert "block_0.mlp.gate_proj.kernel" in parameters or "block_0.mlp.v_proj.kernel" in parameters
    assert module.blocks == [getattr(module, b.name) for b in model.backbone.transformer_layers]
    # Behind hooks, which a module has, biases are added after a product, not in it.
    torch.testing.assert_close(module(X), wanted)
    # As torch's tools do: another parameter takes the place of one.
    norm = module.final_norm if len(list(module.final_norm.parameters())) else module.blocks[0]
    owner = next(m for m in norm.modules() if m._parameters)
    name = next(iter(owner._parameters))
    setattr(owner, name, type(next(owner.parameters()))(owner._parameters[name].detach() * 2 + 1))
    found = module.find_parameters(model.weights)
    assert {id(p) for p in found} == {id(p) for p in module.parameters()}
    changed = module(X)
    assert not torch.allclose(changed, wanted)
    assert (model(X) == changed).all()
    changed.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@any_family
def test_with_labels_a_module_returns_the_loss(family):
    """That of logits, and its gradients."""
    module = TorchModule(model := tiny_causal_lm(family=family))
    labels, weights = X["token_ids"] + 1, np.array([[1.0, 0, 1, 1, 0.5], [0, 1, 1, 0, 0]])
    found = module(X, labels=labels, sample_weight=weights)
    expected = model.loss(labels, module(X), weights)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(loss, module.parameters()) for loss in (found, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_labels_are_refused_where_the_loss_is_made_of_logits():
    x = keras.Input((2,))
    module = TorchModule(keras.Model(x, keras.layers.Dense(2)(x)))
    with pytest.raises(ValueError, match=r"`Functional` is not a language model.*Leave them out"):
        module(np.ones((1, 2)), labels=np.ones((1, 2)))
    with pytest.raises(ValueError, match="`sample_weight` weighs `labels`"):
        module(np.ones((1, 2)), sample_weight=np.ones(1))
    module = TorchModule(model := tiny_causal_lm())
    for given in ({}, {"sample_weight": torch.ones(2)}):
        labels = X["token_ids"] if given else torch.ones((2, 4), dtype=torch.int32)
        name = "sample_weight" if given else "labels"
        with pytest.raises(ValueError, match=rf"`{name}` must have the shape of the tokens"):
            module(X, labels=labels, **given)
    model.compile(weighted_metrics=["accuracy"])
    with pytest.raises(ValueError, match="the metric 'accuracy' reads logits"):
        module(X, labels=X["token_ids"])


def test_only_models_that_are_built_become_modules():
    for given, name in ((keras.layers.Dense(1), "Dense"), (keras.Sequential(), "Sequential")):
        with pytest.raises(ValueError, match=f"must be a Keras model that is built; got .*{name}"):
            TorchModule(given)
    model = tiny_causal_lm()
    TorchModule(model)
    with pytest.raises(ValueError, match="has a `TorchModule` already"):
        TorchModule(model)
    part = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="same")])
    x = keras.Input((2,))
    with pytest.raises(ValueError, match="two layers 'same'"):
        TorchModule(keras.Model(x, keras.layers.Dense(2, name="same")(part(x))))


def test_fit_beside_other_processes_says_the_way(monkeypatch):
    monkeypatch.setattr("keras_recurrent.training.torch_training.count_processes", lambda: 2)
    model = tiny_causal_lm(family="hgrn2")
    model.compile("adam", model.loss)
    with pytest.raises(RuntimeError, match=r"2 different models.*torch_modules.TorchModule"):
        model.fit(X, X["token_ids"], verbose=0)
    assert torch_processes.count_processes() == 1
    model.evaluate(X, X["token_ids"], verbose=0)
