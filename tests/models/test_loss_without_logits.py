"""Training steps without logits equal steps with logits."""

import keras
import keras_hub
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent.models import TokenCrossentropy
from tests.models.tiny import VOCABULARY, shared_by_families, tiny_causal_lm

BACKEND = keras.config.backend()
BATCH, LENGTH = 5, 12


class AccuracyOfLogits(keras.metrics.SparseCategoricalAccuracy):
    """A user's metric, for which a step must compute logits."""


def data(seed=0):
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(1, VOCABULARY, (BATCH, LENGTH)).astype("int32")
    mask = np.arange(LENGTH) < np.array([[LENGTH], [7], [3], [LENGTH], [1]])
    labels = np.where(mask, np.roll(token_ids, -1, 1), -100).astype("int32")
    return {"token_ids": token_ids, "padding_mask": mask}, labels, mask.astype("float32")


def train(model, weights=..., **compiled):
    """Returns the results of `fit` and `evaluate`, and the weights."""
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
    # XLA compiles one size of a batch.
    arguments = {"sample_weight": weights, "batch_size": BATCH, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **arguments).history
    held_out = model.evaluate(x, y, return_dict=True, **arguments)
    return history | held_out, [keras.ops.convert_to_numpy(w) for w in model.weights]


def assert_trains_as_with_logits(make, weights=..., **compiled):
    models = make(), make()
    models[1].set_weights(models[0].get_weights())
    found, found_weights = train(models[0], weights, **compiled)
    expected, expected_weights = train(models[1], weights, metric=AccuracyOfLogits, **compiled)
    sources = [keras_recurrent.which_loss(model).source for model in models]
    assert sources == ["hidden states", "logits"]
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, err_msg=name)
    for a, b in zip(found_weights, expected_weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


@shared_by_families
def test_fit_and_evaluate_without_logits_equal_those_with_logits(family):
    assert_trains_as_with_logits(lambda: tiny_causal_lm(family=family, num_layers=1))


def one_layer():
    return tiny_causal_lm(num_layers=1)


def model_with_lora():
    model = one_layer()
    model.backbone.enable_lora(2)
    return model


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(one_layer, {"weights": None}, id="no sample weights"),
        pytest.param(one_layer, {"weights": data()[2][..., None]}, id="one more axis"),
        pytest.param(
            one_layer,
            {"optimizer": {"gradient_accumulation_steps": 2}},
            id="accumulated gradients",
        ),
        pytest.param(model_with_lora, {}, id="LoRA"),
    ],
)
def test_fit_without_logits_under_options_of_keras_equals_fit_with_logits(make, options):
    assert_trains_as_with_logits(make, **options)


@pytest.mark.once
def test_mean_with_sample_weight_divides_by_the_sum_of_weights():
    """The loss is divided by the number of tokens, padding included."""
    loss = TokenCrossentropy(reduction="mean_with_sample_weight")
    assert_trains_as_with_logits(one_layer, data()[2] / 2, loss=loss)
    model = one_layer()
    model.compile(loss=loss)
    x, y, weights = data()
    assert model.evaluate(x, y, sample_weight=0 * weights, verbose=0)[0] == 0


def test_token_loss_and_perplexity_match_numpy():
    """Batches are weighted by their number of sequences, or padding counts."""
    model = one_layer()
    x, y, weights = data()
    weights = weights / 2
    logits = model.predict(x, verbose=0).astype("float64")
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(log_p, np.maximum(y, 0)[..., None], -1)[..., 0]
    expected = (losses * weights).sum() / weights.sum()
    metrics = [keras_recurrent.metrics.TokenLoss(), keras_recurrent.metrics.Perplexity()]
    model.compile(weighted_metrics=metrics)
    assert keras_recurrent.which_loss(model).source == "hidden states"
    found = model.evaluate(x, y, sample_weight=weights, batch_size=2, verbose=0, return_dict=True)
    np.testing.assert_allclose(found["token_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["perplexity"], np.exp(expected), rtol=1e-4)
    for metric in metrics:  # metrics of logits
        metric = type(metric).from_config(metric.get_config())
        for part in (slice(0, 2), slice(2, None)):
            metric.update_state(y[part], logits[part].astype("float32"), weights[part, :, None])
        np.testing.assert_allclose(float(metric.result()), found[metric.name], rtol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 3)])
def test_weight_of_a_sequence_is_the_weight_of_each_token(shape):
    """The mean is T times too large with one weight for each sequence."""
    y, logits = np.zeros((3, 3), "int32"), np.random.default_rng(0).normal(size=(3, 3, 7))
    weights = np.array([1.0, 0.5, 0.0], "float32").reshape(3, -1)
    losses = np.log(np.exp(logits).sum(-1)) - logits[..., 0]
    expected = (losses * weights).sum() / (3 * weights.sum())
    given = weights[:, 0] if shape == (3,) else np.broadcast_to(weights, shape)
    loss = TokenCrossentropy(reduction="mean_with_sample_weight")
    metric = keras_recurrent.metrics.TokenLoss()
    metric.update_state(y, logits, given)
    for found in (loss(y, logits, given), metric.result()):
        assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.once
def test_loaded_loss_and_metrics_need_no_logits(tmp_path):
    model = one_layer()
    model.compile(
        loss=TokenCrossentropy(reduction="mean_with_sample_weight"),
        weighted_metrics=[keras_recurrent.metrics.Perplexity(name="p")],
    )
    x, y, weights = data()
    expected = model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert keras_recurrent.which_loss(loaded).source == "hidden states"
    found = loaded.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
    assert found == pytest.approx(expected)
    assert expected["p"] == pytest.approx(np.exp(expected["loss"]), rel=1e-5)


@pytest.mark.once
def test_packed_loss_equals_that_with_logits():
    def evaluate_packed(model):
        x, y, weights = data()
        segments = (np.arange(LENGTH) // 5).astype("int32") * np.ones((BATCH, 1), "int32")
        return model.evaluate({**x, "segment_ids": segments}, y, sample_weight=weights, verbose=0)

    model = one_layer()
    model.compile()
    found = evaluate_packed(model)
    model.compile(weighted_metrics=[AccuracyOfLogits()])
    np.testing.assert_allclose(found, evaluate_packed(model), rtol=1e-5)


@pytest.mark.once
def test_loss_of_hidden_states_includes_the_soft_cap():
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


accuracy, perplexity = keras.metrics.SparseCategoricalAccuracy, keras_hub.metrics.Perplexity
READS = "the metric '{}' reads logits"
PERPLEXITY = f"{READS.format('Perplexity')}; `keras_recurrent.metrics.Perplexity()` does not"
OTHER_LOSS = (
    "the loss is not the default `TokenCrossentropy()`, of a `compile` without `loss`, nor one "
    "with `reduction='mean_with_sample_weight'`"
)


@pytest.mark.once
def test_which_loss_gives_the_reason_for_logits():
    """The reason names an argument or a container in place of the metric."""
    cases = [
        ({"weighted_metrics": None}, None),
        ({"metrics": []}, None),
        ({"weighted_metrics": [[accuracy()]]}, None),
        ({"loss_weights": [1.0]}, "`compile` got `loss_weights`"),
        (
            {"metrics": [accuracy()]},
            "'SparseCategoricalAccuracy' is in `metrics` and not in `weighted_metrics`",
        ),
        (
            {"weighted_metrics": ["accuracy"]},
            f"{READS.format('accuracy')}; `keras.metrics.SparseCategoricalAccuracy()` does not",
        ),
        (
            {"weighted_metrics": [keras.metrics.mean_squared_error]},
            READS.format("mean_squared_error"),
        ),
        ({"metrics": [perplexity()]}, PERPLEXITY),
        ({"weighted_metrics": [accuracy(), perplexity()]}, PERPLEXITY),
        ({"weighted_metrics": [[accuracy(), perplexity()]]}, PERPLEXITY),
        ({"weighted_metrics": {"token_embedding": [perplexity()]}}, PERPLEXITY),
        *(
            ({"loss": loss, "weighted_metrics": [perplexity()]}, f"{OTHER_LOSS}; {PERPLEXITY}")
            for loss in (keras.losses.MeanSquaredError(), TokenCrossentropy(reduction="sum"))
        ),
    ]
    model, (x, y, weights) = one_layer(), data()
    for arguments, reason in cases:
        model.compile(**arguments)
        source = "logits" if reason else "hidden states"
        assert keras_recurrent.which_loss(model) == (source, reason)
        if reason is None:
            assert np.isfinite(model.evaluate(x, y, sample_weight=weights, verbose=0)).all()


@pytest.mark.once
def test_which_loss_of_subclasses_16_bit_models_and_others():
    model, which_loss = one_layer(), keras_recurrent.which_loss
    assert which_loss(model) == ("hidden states", None)

    class CustomLM(type(model)):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    custom = CustomLM(model.backbone)
    custom.compile()
    assert "`CustomLM` overrides `compute_loss`" in which_loss(custom).reason
    assert which_loss(tiny_causal_lm(dtype="float16")).source == "logits"
    assert "not compiled" in which_loss(type(model)(model.backbone, compile=False)).reason
    with pytest.raises(TypeError, match=r"takes a language model.*got Dense"):
        which_loss(keras.layers.Dense(1))


@pytest.mark.once
def test_call_and_predict_return_logits_after_a_step_and_after_an_error_in_a_step():
    model = one_layer()
    model.compile(run_eagerly=True)
    x, y, weights = data()
    model.train_on_batch(x, y, sample_weight=weights)
    assert model.predict(x, verbose=0).shape == (BATCH, LENGTH, VOCABULARY)
    assert tuple(model(x).shape) == (BATCH, LENGTH, VOCABULARY)
    with pytest.raises(RuntimeError, match="must match the"):
        model.train_on_batch(x, np.maximum(y, 0), sample_weight=np.ones((BATCH, 3)))
    assert tuple(model(x).shape) == (BATCH, LENGTH, VOCABULARY)


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND != "jax", reason="only XLA reports the memory of a program")
def test_training_step_allocates_no_logits():
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
    with_logits = bytes_of_a_step(weighted_metrics=[AccuracyOfLogits()])
    assert with_logits - bytes_of_a_step() > logits
