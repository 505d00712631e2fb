"""`TorchModule`, a Keras model as a module of torch, in one process."""

import keras
import numpy as np
import pytest

from keras_recurrent.devices import torch_processes
from tests.models.tiny import any_family, tiny_causal_lm, training_batch

if keras.config.backend() != "torch":
    pytest.skip("modules of torch", allow_module_level=True)

import torch

from keras_recurrent.devices.torch_modules import TorchModule

X = {"token_ids": np.arange(10).reshape(2, 5), "padding_mask": np.ones((2, 5), "int32")}


@any_family
@pytest.mark.parametrize("has_lora", [False, True], ids=["plain", "lora"])
def test_parameters_of_model_backbone_and_torch_module_are_their_weights(family, has_lora):
    model = tiny_causal_lm(family=family)
    if has_lora:
        model.backbone.enable_lora(2)
    for network in (model, model.backbone):
        assert {id(p) for p in network.parameters()} == {id(v.value) for v in network.weights}
    module = TorchModule(model)
    parameters = dict(module.named_parameters())
    assert {id(p) for p in parameters.values()} == {id(v.value) for v in model.weights}
    assert "block_1.mlp.gate_proj.kernel" in parameters
    assert module.blocks == [getattr(module, b.name) for b in model.backbone.transformer_layers]


def test_post_build_registers_parameters_only_after_a_change():
    """Each `train_on_batch` registers all parameters again, or none that LoRA has added."""
    model = tiny_causal_lm()
    model._post_build()
    registered = model._torch_params
    model._post_build()
    assert model._torch_params is registered
    model.backbone.enable_lora(2)
    model._post_build()
    assert {id(p) for p in model._torch_params.values()} == {id(v.value) for v in model.weights}


def test_training_step_lists_the_weights_of_all_layers_once(monkeypatch):
    """Keras lists them for the loss, the gradients and the optimizer, or LoRA's are missing."""
    model, batch = tiny_causal_lm(), training_batch()
    model.compile("sgd")
    model.train_on_batch(*batch)  # builds the optimizer
    calls, get = [], keras.layers.Layer.weights.fget
    counted = property(lambda self: calls.append(self) or get(self))
    monkeypatch.setattr(keras.layers.Layer, "weights", counted)
    model.train_on_batch(*batch)
    assert sum(layer is model for layer in calls) == 1
    model.backbone.enable_lora(2)
    model.compile("sgd")
    before = [keras.ops.convert_to_numpy(v) for v in model.trainable_weights]
    model.train_on_batch(*batch)
    assert any("lora" in v.path for v in model.trainable_weights)
    for old, new in zip(before, model.trainable_weights, strict=True):
        if "lora_kernel_b" in new.path:
            assert not np.array_equal(old, keras.ops.convert_to_numpy(new))


@any_family
def test_torch_module_computes_with_replaced_parameters(family):
    """Calls, `find_parameters` or gradients use the weights that torch's tools replaced."""
    model = tiny_causal_lm(family=family)
    expected = model(X)
    module = TorchModule(model)
    # With hooks, which a module has, biases are added after a product, not in it.
    torch.testing.assert_close(module(X), expected)
    norm = module.final_norm if len(list(module.final_norm.parameters())) else module.blocks[0]
    owner = next(m for m in norm.modules() if m._parameters)
    name = next(iter(owner._parameters))
    setattr(owner, name, type(next(owner.parameters()))(owner._parameters[name].detach() * 2 + 1))
    parameters = module.find_parameters(model.weights)
    assert {id(p) for p in parameters} == {id(p) for p in module.parameters()}
    changed = module(X)
    assert not torch.allclose(changed, expected)
    assert (model(X) == changed).all()
    changed.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@any_family
def test_torch_module_with_labels_returns_the_loss_of_the_logits(family):
    module = TorchModule(model := tiny_causal_lm(family=family))
    labels, weights = X["token_ids"] + 1, np.array([[1.0, 0, 1, 1, 0.5], [0, 1, 1, 0, 0]])
    loss = module(X, labels=labels, sample_weight=weights)
    expected = model.loss(labels, module(X), weights)
    torch.testing.assert_close(loss, expected)
    gradients = (torch.autograd.grad(x, module.parameters()) for x in (loss, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_torch_module_of_other_models_rejects_labels():
    x = keras.Input((2,))
    module = TorchModule(keras.Model(x, keras.layers.Dense(2)(x)))
    with pytest.raises(ValueError, match=r"`Functional` is not a language model.*Leave them out"):
        module(np.ones((1, 2)), labels=np.ones((1, 2)))
    with pytest.raises(ValueError, match="`sample_weight` weighs `labels`"):
        module(np.ones((1, 2)), sample_weight=np.ones(1))


def test_torch_module_rejects_labels_of_another_shape_or_for_metrics_of_logits():
    module = TorchModule(model := tiny_causal_lm())
    with pytest.raises(ValueError, match="`labels` must have the shape of the tokens"):
        module(X, labels=torch.ones((2, 4), dtype=torch.int32))
    with pytest.raises(ValueError, match="`sample_weight` must have the shape of the tokens"):
        module(X, labels=X["token_ids"], sample_weight=torch.ones(2))
    model.compile(weighted_metrics=["accuracy"])
    with pytest.raises(ValueError, match="the metric 'accuracy' reads logits"):
        module(X, labels=X["token_ids"])


def test_torch_module_requires_a_built_model_with_unique_names():
    for value in (keras.layers.Dense(1), keras.Sequential()):
        name = type(value).__name__
        with pytest.raises(ValueError, match=f"must be a Keras model that is built; got .*{name}"):
            TorchModule(value)
    model = tiny_causal_lm()
    TorchModule(model)
    with pytest.raises(ValueError, match="has a `TorchModule` already"):
        TorchModule(model)
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="same")])
    x = keras.Input((2,))
    with pytest.raises(ValueError, match="two layers 'same'"):
        TorchModule(keras.Model(x, keras.layers.Dense(2, name="same")(inner(x))))


def test_fit_in_several_processes_raises_with_remedy(monkeypatch):
    monkeypatch.setattr("keras_recurrent.training.torch_training.count_processes", lambda: 2)
    model = tiny_causal_lm(family="hgrn2")
    model.compile("adam", model.loss)
    with pytest.raises(RuntimeError, match=r"2 different models.*torch_modules.TorchModule"):
        model.fit(X, X["token_ids"], verbose=0)
    assert torch_processes.count_processes() == 1
    model.evaluate(X, X["token_ids"], verbose=0)
