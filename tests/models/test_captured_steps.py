"""CUDA graphs of training steps on torch. Without an NVIDIA GPU, a replay runs the function."""

import contextlib
import gc
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_recurrent import optimizers, which_loss
from keras_recurrent.metrics import Perplexity
from tests.gpu import has_gpu
from tests.models.test_text_classifier import LABELS, TEXTS, classifier
from tests.models.tiny import VOCABULARY, any_family, tiny_causal_lm

if keras.config.backend() != "torch":
    pytest.skip("torch captures CUDA graphs", allow_module_level=True)

import torch

from keras_recurrent.training import captured_steps, torch_training

STEPS = 20
# A GPU may add gradients of embeddings in any order.
TOLERANCE = {"rtol": 1e-5 if has_gpu() else 1e-6}


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    """The results of each capture. Without a GPU, a replay overwrites them as a graph does."""
    results = []

    def capture(function, device, pool=None):
        if has_gpu():
            graph, result = original(function, device, pool)
        else:
            result = function()

            def replay():
                pairs = zip(*map(keras.tree.flatten, (result, function())), strict=True)
                for tensor, new in pairs:
                    if tensor is not None:
                        tensor.copy_(new)

            graph = SimpleNamespace(replay=replay, pool=lambda: "pool")
        results.append(result)
        return graph, result

    original = captured_steps.capture
    monkeypatch.setattr(captured_steps, "capture", capture)
    if not has_gpu():
        monkeypatch.setattr(torch_training.TorchTraining, "_is_on_gpu", lambda self: True)
    return results


def make_model(jit_compile, optimizer=None, scope=None, **options):
    with scope or contextlib.nullcontext():
        model = tiny_causal_lm(**{"num_layers": 1, "family": "hgrn2", **options})
    # By default, steps are large enough that a stale input or gradient changes the losses.
    optimizer = optimizer or optimizers.Adam(3e-3, global_clipnorm=0.5)
    metrics = [keras.metrics.SparseCategoricalAccuracy(), Perplexity()]
    model.compile(optimizer, weighted_metrics=metrics, jit_compile=jit_compile)
    return model


def make_batches(count=STEPS, shapes=((2, 12),), seed=0):
    """Batches with padding of different lengths, in the shapes one after the other."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        batch, length = shapes[i % len(shapes)]
        token_ids = rng.integers(1, VOCABULARY, (batch, length)).astype("int32")
        mask = np.arange(length) < rng.integers(1, length + 1, (batch, 1))
        x = {"token_ids": token_ids, "padding_mask": mask}
        yield x, np.roll(token_ids, -1, 1), mask.astype("float32")


def train(model, batches):
    """Returns loss and metrics of each step, whose metrics begin anew."""
    found = []
    for batch in batches:
        model.reset_metrics()
        found.append(list(map(float, model.train_on_batch(*batch))))
    return np.array(found)


def compare(batches, make=make_model, **options):
    """Trains a captured and an eager model; returns the captured one."""
    batches = list(batches)
    models = [make(jit_compile, **options) for jit_compile in (True, False)]
    found, expected = (train(model, batches) for model in models)
    np.testing.assert_allclose(found, expected, **TOLERANCE)
    # Adam scales rounding of gradients near 0 to whole steps.
    for pair in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-3 if has_gpu() else 1e-6)
    return models[0]


@any_family
def test_captured_steps_have_the_losses_of_eager_steps(family, captured):
    compare(make_batches(), family=family)
    assert len(captured) == 1


OPTIMIZERS = {
    "accumulation": lambda: optimizers.AdamW(3e-3, gradient_accumulation_steps=2, clipnorm=0.5),
    "average": lambda: optimizers.Adam(3e-3, use_ema=True, clipvalue=0.01),
    "loss_scale": lambda: keras.optimizers.Adam(3e-3, loss_scale_factor=8.0),
    "keras": lambda: keras.optimizers.AdamW(3e-3, global_clipnorm=0.5),
    "dynamic_loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        optimizers.AdamW(3e-3), dynamic_growth_steps=3
    ),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers_take_the_gradients_of_a_graph(case, captured):
    def make(jit_compile):
        return make_model(jit_compile, OPTIMIZERS[case]())

    compare(make_batches(), make)
    assert len(captured) == 1


def test_loss_of_logits_is_captured(captured):
    def make(jit_compile):
        model = make_model(jit_compile)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, weighted_metrics=["accuracy"], jit_compile=jit_compile)
        return model

    assert which_loss(compare(make_batches(), make)).source == "logits"
    assert len(captured) == 1


def test_second_of_two_consecutive_steps_is_captured_for_two_shapes(captured):
    """A graph of each shape takes the memory of further gradients."""
    a, b, c = (2, 12), (3, 7), (1, 5)
    shapes = [a, b, a, b, a, a, b, a, b, b, c, c, a, b, a, c]
    compare(make_batches(len(shapes), shapes))
    assert [len(gradients) for *_, gradients in captured] == [len(captured[0][2])] * 2


def test_batch_with_and_without_weights_and_segments_has_its_own_graph(captured):
    batches = [*make_batches(6)]
    segments = np.repeat([[0, 1]] * 2, 6, axis=1)
    with_segments = [({**x, "segment_ids": segments}, y) for x, y, _ in batches]
    compare([*batches[:3], *with_segments[:3], *batches[3:], *with_segments[3:]])
    assert len(captured) == 2


def test_frozen_weights_discard_graphs(captured):
    """A graph computes the gradients of weights that are no longer trained."""
    model, batches = make_model(True), [*make_batches(4)]
    train(model, batches)
    frozen = model.backbone.token_embedding
    frozen.trainable = False
    model.compile(optimizers.Adam(3e-3), jit_compile=True)
    before = frozen.embeddings.numpy(), model.backbone.final_norm.weights[0].numpy()
    train(model, batches)
    np.testing.assert_array_equal(frozen.embeddings.numpy(), before[0])
    assert not np.array_equal(model.backbone.final_norm.weights[0].numpy(), before[1])
    assert len(captured[0][2]) == len(captured[1][2]) + len(frozen.weights)


def test_fit_with_a_smaller_last_batch_evaluates_and_generates_between_steps(captured):
    (x, y, weights), found = next(make_batches(1, [(9, 12)])), []
    for jit_compile in (True, False):
        model = make_model(jit_compile)
        history = model.fit(
            *(x, y, 2),
            sample_weight=weights,
            shuffle=False,
            epochs=3,
            verbose=0,
            validation_data=(x, y, weights),
            callbacks=[
                keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda epoch, logs, model=model: model.generate(
                        {"token_ids": x["token_ids"][:1], "padding_mask": np.arange(12)[None] < 4},
                        stop_token_ids=None,
                    )
                )
            ],
        )
        found.append([*history.history.values()])
    np.testing.assert_allclose(*found, **TOLERANCE)
    assert len(captured) == 1


def test_forward_and_backward_copy_no_numbers_to_the_device(monkeypatch):
    """A capture of the step fails."""
    model = make_model(True)
    steps = captured_steps.CapturedSteps(model)
    weights = [v._value for v in model.trainable_weights]
    batch = keras.tree.map_structure(keras.ops.convert_to_tensor, next(make_batches(1)))
    expected, *_ = model._run_without_logits(steps._run_passes, batch, weights)
    monkeypatch.delattr(torch, "as_tensor")  # with which Keras copies numbers to the device
    for name in ("__bool__", "__float__", "__int__", "item"):
        monkeypatch.setattr(torch.Tensor, name, None)
    loss, *_ = model._run_without_logits(steps._run_passes, batch, weights)
    monkeypatch.undo()
    assert float(loss) == float(expected)


@pytest.mark.parametrize("family", ["griffin", "hgrn2", "lightning_hybrid", "lfm2"])
def test_passes_keep_no_gradient_function(family, monkeypatch):
    """A capture fails: it adds gradients on the stream of an earlier pass."""
    model = make_model(False, family=family)
    steps, compute_loss = captured_steps.CapturedSteps(model), model.compute_loss
    weights = [v._value for v in model.trainable_weights]
    batch = keras.tree.map_structure(keras.ops.convert_to_tensor, next(make_batches(1)))

    def metadata():
        return [torch.autograd.graph.get_gradient_edge(w).node.metadata for w in weights]

    def mark(*arguments, **named):
        loss = compute_loss(*arguments, **named)
        for each in metadata():
            each["pass"] = 1
        return loss

    def run():
        steps._run_passes(batch, weights)
        return metadata()

    monkeypatch.setattr(model, "compute_loss", mark)
    gc.disable()
    try:
        assert not any(model._run_without_logits(run))
    finally:
        gc.enable()


def add_hook(model):
    model.backbone.final_norm.register_forward_hook(lambda *arguments: None)


def add_backward_hook(model):
    model.backbone.final_norm.register_full_backward_hook(lambda *arguments: None)


def add_weight_hook(model):
    model.trainable_weights[0].value.register_hook(lambda gradient: gradient)


REASONS = {
    add_hook: "`final_norm` has a hook",
    add_backward_hook: "`final_norm` has a hook",
    add_weight_hook: "a weight has a hook",
}


@pytest.mark.parametrize("change", REASONS)
def test_eager_steps_report_their_reason_once(change, captured):
    model, batches = make_model(True), [*make_batches(4)]
    change(model)
    with pytest.warns(UserWarning, match=f"no CUDA graph: {REASONS[change]}") as warned:
        found = train(model, batches)
    assert sum(w.category is UserWarning for w in warned) == 1
    assert not captured
    np.testing.assert_allclose(found, train(make_model(False), batches), **TOLERANCE)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_classifier_is_captured_without_dropout(dropout, captured):
    """Each replay of a dropout has the same random numbers."""
    losses = []
    for jit_compile in (True, False):
        keras.utils.set_random_seed(0)
        model = classifier(dropout=dropout)
        model.compile(keras.optimizers.Adam(0.01), jit_compile=jit_compile)
        is_eager = dropout and jit_compile
        with pytest.warns(match="draws random") if is_eager else contextlib.nullcontext():
            history = model.fit(TEXTS, LABELS, batch_size=4, epochs=3, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(*losses, **TOLERANCE)
    assert len(captured) == (not dropout)


def test_rematerialized_model_runs_eagerly(captured):
    with pytest.warns(UserWarning, match="was made in a `keras.RematScope`"):
        compare(make_batches(3), scope=keras.RematScope("full"))
    assert not captured


def test_hook_added_after_a_capture_is_called(captured):
    model, calls, batches = make_model(True), [], [*make_batches(4)]
    train(model, batches)
    model.backbone.final_norm.register_forward_hook(lambda *arguments: calls.append(1))
    with pytest.warns(UserWarning, match="has a hook"):
        train(model, batches)
    assert captured
    assert len(calls) == len(batches)


def test_step_that_torch_cannot_capture_runs_eagerly(monkeypatch):
    """An error of a capture ends the training, or a step is lost."""
    batches = [*make_batches(5)]
    model = make_model(True)
    if has_gpu():
        norm = model.backbone.final_norm
        call = type(norm).call
        monkeypatch.setattr(type(norm), "call", lambda self, x: call(self, x * float(x.max() > 0)))
    else:

        def capture(function, device, pool=None):
            function()
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(captured_steps, "capture", capture)
    with pytest.warns(UserWarning, match="no CUDA graph: torch could not capture") as warned:
        found = train(model, batches)
    assert sum(w.category is UserWarning for w in warned) == 1
    monkeypatch.undo()
    np.testing.assert_allclose(found, train(make_model(False), batches), **TOLERANCE)


def test_subclass_with_its_own_step_is_compiled_by_torch():
    model = make_model(True)

    class Own(type(model)):
        def train_step(self, data):
            return super().train_step(data)

    own = Own(model.backbone)
    own.compile("adam", jit_compile=True)
    assert own._should_torch_compile()
    assert not model._should_torch_compile()


def test_auto_and_false_capture_nothing(captured):
    for jit_compile in ("auto", False):
        with warnings.catch_warnings(action="error"):
            train(make_model(jit_compile), make_batches(4))
    assert not captured
