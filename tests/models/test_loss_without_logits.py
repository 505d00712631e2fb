"""A training step that makes no logits is the step that makes them."""

import keras
import keras_hub
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent.models import TokenCrossentropy
from tests.models.tiny import FEWER_LAYERS, VOCABULARY, shared_by_families, tiny_causal_lm

BACKEND = keras.config.backend()
BATCH, LENGTH = 5, 12


class OfLogits(keras.metrics.SparseCategoricalAccuracy):
    """The default metric under another class, which is one of the user's own."""


def data(seed=0):
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(1, VOCABULARY, (BATCH, LENGTH)).astype("int32")
    mask = np.arange(LENGTH) < np.array([[LENGTH], [7], [3], [LENGTH], [1]])
    labels = np.where(mask, np.roll(token_ids, -1, 1), -100).astype("int32")
    return {"token_ids": token_ids, "padding_mask": mask}, labels, mask.astype("float32")


def trained(model, weights=..., **compiled):
    """What `fit` and `evaluate` say, and the weights."""
    metric = compiled.pop("metric", keras.metrics.SparseCategoricalAccuracy)
    model.compile(
        keras.optimizers.SGD(0.05, **compiled.pop("optimizer", {})),
        weighted_metrics=[metric(name="accuracy")],
        **compiled,
    )
    x, y, mask = data()
    weights = mask if weights is ... else weights
    if weights is None:
        y = np.maximum(y, 0)
    history = model.fit(
        x, y, sample_weight=weights, batch_size=2, epochs=2, shuffle=False, verbose=0
    ).history
    held_out = model.evaluate(
        x, y, sample_weight=weights, batch_size=2, verbose=0, return_dict=True
    )
    return history | held_out, [keras.ops.convert_to_numpy(w) for w in model.weights]


def compare(make, weights=..., **compiled):
    models = make(), make()
    models[1].set_weights(models[0].get_weights())
    found, after = trained(models[0], weights, **compiled)
    expected, wanted = trained(models[1], weights, metric=OfLogits, **compiled)
    ways = [keras_recurrent.which_loss(model).source for model in models]
    assert ways == ["hidden states", "logits"]
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, err_msg=name)
    for a, b in zip(after, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


@shared_by_families
def test_fit_and_evaluate_give_the_same(family):
    compare(lambda: tiny_causal_lm(family=family, **FEWER_LAYERS))


@pytest.mark.once
@pytest.mark.parametrize(
    "weights",
    [None, data()[2][..., None]],
    ids=["none", "an axis more"],
)
def test_weights_as_keras_takes_them(weights):
    compare(tiny_causal_lm, weights)


@pytest.mark.once
def test_the_mean_over_weights():
    """Fails if the loss is divided by the number of tokens, padding included."""
    loss = TokenCrossentropy(reduction="mean_with_sample_weight")
    sizes = {"num_layers": 1, "block_types": ("recurrent",)}
    compare(lambda: tiny_causal_lm(**sizes), data()[2] / 2, loss=loss)
    model = tiny_causal_lm(**sizes)
    model.compile(loss=loss)
    x, y, weights = data()
    assert model.evaluate(x, y, sample_weight=0 * weights, verbose=0)[0] == 0


def test_token_loss_and_perplexity_are_numpys():
    """Fails if batches count by their number of sequences, or if padding counts."""
    model = tiny_causal_lm(**FEWER_LAYERS)
    x, y, weights = data()
    weights = weights / 2
    logits = model.predict(x, batch_size=2, verbose=0).astype("float64")
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(log_p, np.maximum(y, 0)[..., None], -1)[..., 0]
    wanted = (losses * weights).sum() / weights.sum()
    metrics = [keras_recurrent.metrics.TokenLoss(), keras_recurrent.metrics.Perplexity()]
    model.compile(weighted_metrics=metrics)
    assert keras_recurrent.which_loss(model).source == "hidden states"
    found = model.evaluate(x, y, sample_weight=weights, batch_size=2, verbose=0, return_dict=True)
    np.testing.assert_allclose(found["token_loss"], wanted, rtol=1e-5)
    np.testing.assert_allclose(found["perplexity"], np.exp(wanted), rtol=1e-4)
    for metric in metrics:  # from logits
        metric = type(metric).from_config(metric.get_config())
        for rows in (slice(0, 2), slice(2, None)):
            metric.update_state(y[rows], logits[rows].astype("float32"), weights[rows, :, None])
        np.testing.assert_allclose(float(metric.result()), found[metric.name], rtol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 3)])
def test_weights_of_sequences_are_those_of_their_tokens(shape):
    """The mean was T times too large with one weight for each sequence."""
    y, logits = np.zeros((3, 3), "int32"), np.random.default_rng(0).normal(size=(3, 3, 7))
    weights = np.array([1.0, 0.5, 0.0], "float32").reshape(3, -1)
    losses = np.log(np.exp(logits).sum(-1)) - logits[..., 0]
    wanted = (losses * weights).sum() / (3 * weights.sum())
    given = weights[:, 0] if shape == (3,) else np.broadcast_to(weights, shape)
    loss = TokenCrossentropy(reduction="mean_with_sample_weight")
    metric = keras_recurrent.metrics.TokenLoss()
    metric.update_state(y, logits, given)
    for found in (loss(y, logits, given), metric.result()):
        assert float(found) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.once
def test_saved_metrics_need_no_logits(tmp_path):
    model = tiny_causal_lm(num_layers=1)
    model.compile(
        loss=TokenCrossentropy(reduction="mean_with_sample_weight"),
        weighted_metrics=[keras_recurrent.metrics.Perplexity(name="p")],
    )
    x, y, weights = data()
    wanted = model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert keras_recurrent.which_loss(loaded).source == "hidden states"
    found = loaded.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
    assert found == pytest.approx(wanted)
    assert wanted["p"] == pytest.approx(np.exp(wanted["loss"]), rel=1e-5)


@pytest.mark.once
def test_gradients_that_are_accumulated():
    compare(tiny_causal_lm, optimizer={"gradient_accumulation_steps": 2})


def test_packed_rows():
    def with_segments(model):
        x, y, weights = data()
        segments = (np.arange(LENGTH) // 5).astype("int32") * np.ones((BATCH, 1), "int32")
        return model.evaluate({**x, "segment_ids": segments}, y, sample_weight=weights, verbose=0)

    model = tiny_causal_lm(**FEWER_LAYERS)
    model.compile()
    found = with_segments(model)
    model.compile(weighted_metrics=[OfLogits()])
    np.testing.assert_allclose(found, with_segments(model), rtol=1e-5)


def test_soft_cap():
    """Fails if the loss of hidden states leaves out the soft cap of the logits."""
    model = tiny_causal_lm(num_layers=1, block_types=("recurrent",), final_logit_soft_cap=2.0)
    _, y, weights = data()
    hidden = np.random.default_rng(1).normal(size=(BATCH, LENGTH, 16)).astype("float32")
    loss, best = model.loss_of_hidden_states(keras.ops.convert_to_tensor(hidden), y, weights)
    embeddings = keras.ops.convert_to_numpy(model.backbone.token_embedding.embeddings)
    z = 2 * np.tanh(hidden.astype("float64") @ embeddings.T / 2)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    label = np.take_along_axis(log_p, np.maximum(y, 0)[..., None], -1)[..., 0]
    loss, best = map(keras.ops.convert_to_numpy, (loss, best))
    np.testing.assert_allclose(loss, -(label * weights).sum() / y.size, rtol=1e-5)
    np.testing.assert_array_equal(best, z.argmax(-1))


@pytest.mark.once
def test_low_rank_weights_and_frozen_ones():
    def make():
        model = tiny_causal_lm()
        model.backbone.enable_lora(2)
        return model

    compare(make)


@pytest.mark.once
def test_outside_of_a_step_there_are_logits():
    model = tiny_causal_lm()
    x, y, weights = data()
    model.compile()
    model.train_on_batch(x, y, sample_weight=weights)
    assert tuple(model(x).shape) == (BATCH, LENGTH, VOCABULARY)
    assert model.predict(x, verbose=0).shape == (BATCH, LENGTH, VOCABULARY)


@pytest.mark.once
def test_what_asks_for_logits_says_so():
    model = tiny_causal_lm()
    ask = keras_recurrent.which_loss
    assert ask(model) == ("hidden states", None)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert "the loss is not the default" in ask(model).reason
    model.compile(loss_weights=[1.0])
    assert ask(model).reason == "`compile` got `loss_weights`"
    model.compile(weighted_metrics=["accuracy"])
    assert "the metric 'accuracy' reads logits" in str(ask(model))
    model.compile(weighted_metrics=None)
    assert ask(model).source == "hidden states"

    class Own(type(model)):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    own = Own(model.backbone)
    own.compile()
    assert "`Own` overrides `compute_loss`" in ask(own).reason
    assert ask(tiny_causal_lm(dtype="float16")).source == "logits"
    uncompiled = type(model)(model.backbone, compile=False)
    assert "not compiled" in ask(uncompiled).reason
    with pytest.raises(TypeError, match=r"takes a language model.*got Dense"):
        ask(keras.layers.Dense(1))


@pytest.mark.once
def test_a_metric_that_reads_logits_is_named():
    """Fails if the argument, a container or only another reason is named, and not the metric."""
    model, accuracy = tiny_causal_lm(num_layers=1), keras.metrics.SparseCategoricalAccuracy
    perplexity = keras_hub.metrics.Perplexity
    for arguments in (
        {"weighted_metrics": [accuracy(), perplexity()]},
        {"weighted_metrics": [[accuracy(), perplexity()]]},
        {"weighted_metrics": {"token_embedding": [perplexity()]}},
        {"metrics": [perplexity()]},
        {"weighted_metrics": [keras.metrics.mean_squared_error]},
    ):
        model.compile(**arguments)
        name = "mean_squared_error" if "function" in str(arguments) else "Perplexity"
        because = f"the metric {name!r} reads logits"
        if name == "Perplexity":
            because += "; `keras_recurrent.metrics.Perplexity()` does not"
        assert keras_recurrent.which_loss(model) == ("logits", because)
    for loss in (keras.losses.MeanSquaredError(), TokenCrossentropy(reduction="sum")):
        model.compile(loss=loss, weighted_metrics=[perplexity()])
        reason = keras_recurrent.which_loss(model).reason
        assert "loss is not the default" in reason
        assert "metric 'Perplexity'" in reason
    model.compile(metrics=[accuracy()])
    assert "is in `metrics` and not in `weighted_m" in keras_recurrent.which_loss(model).reason
    for arguments in ({"metrics": []}, {"weighted_metrics": [[accuracy()]]}):
        model.compile(**arguments)
        assert keras_recurrent.which_loss(model).source == "hidden states"
        x, y, weights = data()
        assert np.isfinite(model.evaluate(x, y, sample_weight=weights, verbose=0)).all()


@pytest.mark.once
def test_an_error_inside_a_step_leaves_logits_outside():
    model = tiny_causal_lm()
    model.compile(run_eagerly=True)
    x, y, _ = data()
    with pytest.raises(RuntimeError, match="must match the existing size"):
        model.train_on_batch(x, np.maximum(y, 0), sample_weight=np.ones((BATCH, 3)))
    assert tuple(model(x).shape) == (BATCH, LENGTH, VOCABULARY)


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND != "jax", reason="XLA tells the memory of a program")
def test_a_step_keeps_no_logits():
    import jax

    def bytes_of_a_step(**compiled):
        model = tiny_causal_lm(vocabulary_size=20_000)
        model.compile(keras.optimizers.SGD(0.05), **compiled)
        x, y, weights = data()
        model.train_on_batch(x, y, sample_weight=weights)
        state = model._get_jax_state(
            trainable_variables=True,
            non_trainable_variables=True,
            optimizer_variables=True,
            metrics_variables=True,
        )
        x = {name: np.repeat(t, 2000, 0) for name, t in x.items()}
        given = x, np.repeat(y, 2000, 0), np.repeat(weights, 2000, 0)
        step = jax.jit(model.train_step).lower(state, given).compile()
        return step.memory_analysis().temp_size_in_bytes

    logits = 2000 * BATCH * LENGTH * 20_000 * 4
    spared = bytes_of_a_step(weighted_metrics=[OfLogits()]) - bytes_of_a_step()
    assert spared > logits
