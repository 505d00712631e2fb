"""Training steps of language models that compute the loss from hidden states, without logits.

Inside such a step, `call` returns hidden states. Keras's `y_pred` holds them in `compute_loss`, and
`Predictions` in `compute_metrics` on JAX and in captured steps.
"""

import threading
import types
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_recurrent.layers.reversible_embedding import ReversibleEmbedding
from keras_recurrent.ops.linear_crossentropy import linear_crossentropy
from keras_recurrent.training.token_crossentropy import TokenCrossentropy
from keras_recurrent.training.token_metrics import Perplexity, TokenLoss, as_token_weights

# Metrics that do not read logits, by the names of metrics that do.
_METRICS_WITHOUT_LOGITS = {
    "accuracy": "; `keras.metrics.SparseCategoricalAccuracy()` does not",
    "Perplexity": "; `keras_recurrent.metrics.Perplexity()` does not",
}
# Methods that a step calls. A subclass that overrides one expects logits as `y_pred`.
_STEP_METHODS = ("train_step", "test_step", "call", "compute_loss", "compute_metrics")
_REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight")
# `model` of the running step in this thread, and its `predictions` after the loss.
_active_step = threading.local()


class Predictions(NamedTuple):
    """Results of a step from which the metrics are computed.

    Attributes:
        best: integers `[B, T]`, the predicted tokens.
        total: scalar, the sum of the weighted losses of the tokens.
        weight: scalar, the sum of their weights.
    """

    best: Any
    total: Any
    weight: Any


class LossReport(NamedTuple):
    """Source of the loss, hidden states or logits, and the reasons for logits."""

    source: str
    reason: str | None

    def __str__(self):
        return f"{self.source}: {self.reason}" if self.reason else self.source


def which_loss(model):
    """Reports whether `fit` and `evaluate` compute the loss without logits, or why they do not.

    Without logits, `keras_recurrent.ops.linear_crossentropy` computes the loss from hidden states.
    The results are equal, and a step needs less memory, by two tensors of the size of the logits.

    Args:
        model: a language model of this package.

    Returns:
        A named tuple of `source`, `"hidden states"` or `"logits"`, and `reason`, all reasons for
        logits, such as a loss or a metric other than the defaults of `compile`, or an overridden
        method of a subclass. It is None for hidden states.

    Raises:
        TypeError: `model` is not a language model of this package.

    Example:

    >>> import keras_recurrent
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> print(keras_recurrent.which_loss(model))
    hidden states
    >>> model.compile(weighted_metrics=["sparse_top_k_categorical_accuracy"])
    >>> print(keras_recurrent.which_loss(model))
    logits: the metric 'sparse_top_k_categorical_accuracy' reads logits
    """
    if not isinstance(model, LossWithoutLogits):
        raise TypeError(
            "`which_loss` takes a language model of keras_recurrent, such as `GriffinCausalLM`; "
            f"got {type(model).__name__}."
        )
    reason = model.logits_reason()
    return LossReport("logits" if reason else "hidden states", reason)


class LossWithoutLogits:
    """Mixin for a language model: with the default loss, a step computes no logits.

    Inside `train_step` and `test_step` only, the model then returns hidden states, and the loss
    finds the predicted tokens, from which the accuracy is computed.
    """

    backbone: Any
    loss: Any
    losses: Any
    get_metrics_result: Any
    _aggregate_additional_loss: Any
    _compile_metrics: Any

    def compile(self, optimizer="auto", loss="auto", *, weighted_metrics="auto", **kwargs):
        if isinstance(weighted_metrics, str) and weighted_metrics == "auto":
            weighted_metrics = [keras.metrics.SparseCategoricalAccuracy()]  # as in KerasHub
        # In an object, since Keras tracks metrics in attributes as additional ones.
        self._requested_metrics = types.SimpleNamespace(
            weighted=_flatten(weighted_metrics), unweighted=_flatten(kwargs.get("metrics"))
        )
        self._has_loss_weights = kwargs.get("loss_weights") is not None
        super().compile(optimizer, loss, weighted_metrics=weighted_metrics, **kwargs)  # type: ignore[misc]

    def logits_reason(self) -> str | None:
        """Returns the reasons why the loss is computed from logits, or None if it is not."""
        if not getattr(self, "compiled", False):
            return "the model is not compiled"
        return "; ".join(self._logits_reasons()) or None

    def _logits_reasons(self):
        if type(self.loss) is not TokenCrossentropy or self.loss.reduction not in _REDUCTIONS:
            yield (
                "the loss is not the default `TokenCrossentropy()`, of a `compile` without `loss`, "
                "nor one with `reduction='mean_with_sample_weight'`"
            )
        if self._has_loss_weights:
            yield "`compile` got `loss_weights`"
        requested = self._requested_metrics
        for metric in requested.weighted + requested.unweighted:
            if type(metric) not in (keras.metrics.SparseCategoricalAccuracy, TokenLoss, Perplexity):
                name = _metric_name(metric)
                yield f"the metric {name!r} reads logits{_METRICS_WITHOUT_LOGITS.get(name, '')}"
            elif metric in requested.unweighted:
                yield f"{_metric_name(metric)!r} is in `metrics` and not in `weighted_metrics`"
        embedding = self.backbone.token_embedding
        if type(embedding) is not ReversibleEmbedding:
            yield f"`token_embedding` is a `{type(embedding).__name__}`"
        elif getattr(embedding, "quantization_mode", None) is not None:
            yield "`token_embedding` is quantized"
        if embedding.compute_dtype == "float16":
            yield "in float16 the loss must be scaled before gradients are computed"
        for name in _STEP_METHODS:
            if getattr(type(self), name).__module__.partition(".")[0] != __name__.partition(".")[0]:
                yield f"`{type(self).__name__}` overrides `{name}`"

    def train_step(self, *args, **kwargs):
        return self._run_without_logits(super().train_step, *args, **kwargs)  # type: ignore[misc]

    def test_step(self, *args, **kwargs):
        return self._run_without_logits(super().test_step, *args, **kwargs)  # type: ignore[misc]

    def _run_without_logits(self, step, *args, **kwargs):
        if self.logits_reason() is not None:
            return step(*args, **kwargs)
        _active_step.model, _active_step.predictions = self, None
        try:
            return step(*args, **kwargs)
        finally:
            _active_step.model = _active_step.predictions = None

    def call(self, inputs, training=None, mask=None):
        if getattr(_active_step, "model", None) is self:
            return self.backbone(inputs, training=training)
        return super().call(inputs, training=training, mask=mask)  # type: ignore[misc]

    def compute_loss_and_updates(self, *args, **kwargs):
        """Returns the predictions as `y_pred` from the differentiated function of JAX."""
        outputs = super().compute_loss_and_updates(*args, **kwargs)  # type: ignore[misc]
        loss, (unscaled, y_pred, *rest) = outputs
        return loss, (unscaled, self._predictions_of(y_pred), *rest)

    def _predictions_of(self, y_pred):
        return _active_step.predictions if getattr(_active_step, "model", None) is self else y_pred

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if getattr(_active_step, "model", None) is not self:
            return super().compute_loss(x, y, y_pred, sample_weight, training)  # type: ignore[misc]
        predictions = self._predict_from(y_pred, y, sample_weight)
        _active_step.predictions, loss = predictions, self._reduce(predictions)
        # Keras's aggregation of a loss, which handles the replicas of `tf.distribute`.
        losses = map(self._aggregate_additional_loss, (loss, *self.losses))
        return sum(ops.cast(value, loss.dtype) for value in losses)

    def loss_of_hidden_states(self, hidden_states, y, sample_weight=None):
        """Returns the mean loss of tokens `y` `[B, T]`, and the tokens of the largest logits."""
        predictions = self._predict_from(hidden_states, y, sample_weight)
        return self._reduce(predictions), predictions.best

    def _predict_from(self, hidden_states, y, sample_weight):
        """Returns the `Predictions` from hidden states."""
        embedding = self.backbone.token_embedding
        weights = embedding.embeddings
        if not embedding.tie_weights:
            weights = ops.transpose(embedding.reverse_embeddings)
        hidden_states, weights = (
            ops.cast(t, embedding.reverse_dtype) for t in (hidden_states, weights)
        )
        tokens = ops.convert_to_tensor(y)
        token_weights = as_token_weights(tokens, sample_weight)
        total, best = linear_crossentropy(
            hidden_states,
            weights,
            tokens,
            None if sample_weight is None else token_weights,
            soft_cap=embedding.logit_soft_cap,
        )
        return Predictions(best, total, ops.sum(token_weights))

    def _reduce(self, predictions):
        """Returns the mean loss: per unit of weight or per token, as the loss's `reduction` is."""
        total = predictions.total
        if self.loss.reduction == "mean_with_sample_weight":
            return ops.divide_no_nan(total, ops.cast(predictions.weight, total.dtype))
        return total / ops.sum(ops.ones_like(predictions.best, dtype=total.dtype))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        if getattr(_active_step, "model", None) is not self:
            return super().compute_metrics(x, y, y_pred, sample_weight)  # type: ignore[misc]
        given = isinstance(y_pred, Predictions)
        best, total, weight = y_pred if given else _active_step.predictions
        if self._compile_metrics is not None and not self._compile_metrics.built:
            self._compile_metrics.build(y, best)
        matches = ops.equal(ops.cast(y, "int32"), best)
        for metric in self._requested_metrics.weighted:
            if isinstance(metric, TokenLoss):
                metric.add(ops.stop_gradient(total), weight)
            else:
                keras.metrics.Mean.update_state(metric, matches, sample_weight)
        return self.get_metrics_result()


def _flatten(metrics):
    """Returns a list of the metrics of the one output, which Keras takes in nested structures."""
    return keras.tree.flatten(metrics or [])


def _metric_name(metric):
    """Returns a string metric itself, or the name of a function or class."""
    return metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)
