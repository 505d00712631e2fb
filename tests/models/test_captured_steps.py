"""CUDA graphs of training steps on torch. On a CPU, a replay runs the function."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_recurrent import optimizers
from tests.gpu import has_gpu
from tests.models.test_text_classifier import LABELS, TEXTS, classifier
from tests.models.tiny import VOCABULARY, any_family, tiny_causal_lm

if keras.config.backend() != "torch":
    pytest.skip("torch captures CUDA graphs", allow_module_level=True)

import torch

from keras_recurrent.training import captured_steps, torch_training

needs_gpu = pytest.mark.skipif(not has_gpu(), reason="needs an NVIDIA GPU")


@pytest.fixture
def captured(monkeypatch):
    """The results of each capture, which a replay overwrites as a graph does."""
    found = []

    def capture(function, device):
        result = function()
        found.append(result)

        def replay():
            for tensor, new in zip(*map(keras.tree.flatten, (result, function())), strict=True):
                tensor.copy_(new)

        return SimpleNamespace(replay=replay), result

    monkeypatch.setattr(captured_steps, "capture", capture)
    monkeypatch.setattr(torch_training.TorchTraining, "_is_on_gpu", lambda self: True)
    return found


def make_model(jit_compile, family="hgrn2"):
    model, adam = tiny_causal_lm(family=family), optimizers.Adam(3e-3, global_clipnorm=0.5)
    optimizer = keras.optimizers.LossScaleOptimizer(adam, dynamic_growth_steps=3)
    model.compile(optimizer, jit_compile=jit_compile)
    return model


def make_batches(count, batch=2, length=12):
    """Returns batches with padding of different lengths."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, VOCABULARY, (count, batch, length)).astype("int32")
    masks = np.arange(length) < rng.integers(1, length + 1, (count, batch, 1))
    inputs = [{"token_ids": i, "padding_mask": m} for i, m in zip(ids, masks, strict=True)]
    return [*zip(inputs, np.roll(ids, -1, 2), masks.astype("float32"), strict=True)]


def compare(batches, **options):
    """Trains a captured and an eager model with equal results."""
    models = [make_model(jit_compile, **options) for jit_compile in (True, False)]
    for batch in batches:
        np.testing.assert_allclose(*(m.train_on_batch(*batch) for m in models), rtol=1e-5)
    # Adam scales rounding of gradients near 0 to whole steps.
    for pair in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-3 if has_gpu() else 1e-6)


@needs_gpu
@any_family
def test_steps_captured_on_a_gpu_equal_eager_steps(family):
    compare(make_batches(6), family=family)


@needs_gpu
def test_failed_capture_on_a_gpu_leaves_nothing(monkeypatch):
    """Random numbers or other captures fail."""
    norm = type(make_model(False).backbone.final_norm)
    call = norm.call
    monkeypatch.setattr(norm, "call", lambda self, x: call(self, x * float(x.max() < torch.inf)))
    with pytest.warns(match="torch could not capture the step: CUDA error: "):
        compare(make_batches(3))
    monkeypatch.undo()
    torch.rand(1, device="cuda")
    compare(make_batches(3))


@any_family
def test_passes_copy_no_numbers_and_use_no_function_of_earlier_steps(family, monkeypatch):
    """A capture fails if eager steps' gradient functions add gradients, or if Keras copies."""
    model, (batch,) = make_model(False, family=family), make_batches(1)
    model.train_on_batch(*batch)
    model.zero_grad()
    batch = keras.tree.map_structure(keras.ops.convert_to_tensor, batch)
    passes, variables = captured_steps.CapturedSteps(model)._run_passes, model.trainable_weights
    monkeypatch.delattr(torch, "as_tensor")  # with which Keras copies numbers to the device
    *_, gradients = model._run_without_logits(passes, batch, variables)
    assert all(gradient is not None for gradient in gradients)
    assert all(variable.value.grad is None for variable in variables)


def test_second_of_two_equal_steps_is_captured(captured):
    """A graph has inputs, gradients or a loss scale of an earlier step, or runs other shapes."""
    (a, b, c, d), (e, *others) = make_batches(4), make_batches(3, 3, 7)
    compare([e, a, e, a, b, *others, c, c[:2], d])
    assert len(captured) == 1


def test_classifier_is_captured_without_dropout(captured):
    """Each replay of a dropout has the same random numbers, or metrics have no logits."""
    histories = []
    for jit_compile in (True, False):
        model = classifier()
        model.compile("adam", metrics=["accuracy"], jit_compile=jit_compile)
        history = model.fit(TEXTS, LABELS, batch_size=4, epochs=3, shuffle=False, verbose=0)
        histories.append([*history.history.values()])
    np.testing.assert_allclose(*histories, rtol=1e-5)
    model = classifier(dropout=0.1)
    model.compile("adam", jit_compile=True)
    with pytest.warns(match="draws random numbers"):
        model.fit(TEXTS, LABELS, batch_size=4, verbose=0)
    assert len(captured) == 1


def test_hook_added_after_a_capture_is_called(captured):
    model, calls, batches = make_model(True), [], make_batches(4)
    for batch in batches[:2]:
        model.train_on_batch(*batch)
    model.trainable_weights[0].value.register_hook(lambda gradient: calls.append(1))
    with pytest.warns(match="a weight has a hook"):
        model.train_on_batch(*batches[2])
    model.train_on_batch(*batches[3])
    assert (len(captured), len(calls)) == (1, 2)


def test_step_that_torch_cannot_capture_runs_eagerly(captured, monkeypatch):
    """An error of a capture ends the training, or a step is lost, or the cause is not reported."""

    def capture(*arguments):
        try:
            raise RuntimeError("CUDA error: operation not permitted\nmore")
        except RuntimeError:
            raise RuntimeError("Exception encountered when calling a layer.") from None

    monkeypatch.setattr(captured_steps, "capture", capture)
    with pytest.warns(match="the step: CUDA error: operation not permitted.$"):
        compare(make_batches(4))


def test_own_step_is_compiled_by_torch(captured):
    own = make_model(True)
    assert not own._should_torch_compile()
    own.__class__ = type("Own", (type(own),), {"train_step": lambda self, data: None})
    assert own._should_torch_compile()
