"""Training steps of language models whose loss is made of hidden states, without all logits."""

import threading
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_recurrent.layers.reversible_embedding import ReversibleEmbedding
from keras_recurrent.ops.linear_crossentropy import linear_crossentropy
from keras_recurrent.training.token_crossentropy import TokenCrossentropy

# What a step calls: a subclass that has one of its own means logits by `y_pred`.
_STEPS = ("train_step", "test_step", "call", "compute_loss", "compute_metrics")
# Of the step under way in this thread: its `model`, and the `best` tokens once the loss is known.
_under_way = threading.local()


class LossWay(NamedTuple):
    """What the loss of a step is made of, and why not of hidden states."""

    made_of: str
    because: str | None

    def __str__(self):
        return f"{self.made_of}: {self.because}" if self.because else self.made_of


def which_loss(model):
    """Tell whether `fit` and `evaluate` make the loss without the logits of all tokens, or why not.

    Where they do, by `keras_recurrent.ops.linear_crossentropy`, a step needs two tensors of the
    logits' size less, and what it returns and learns is the same.

    Args:
        model: a language model of this package.

    Returns:
        A named tuple of `made_of`, `"hidden states"` or `"logits"`, and `because`, the reason for
        logits: a loss or a metric other than the defaults of `compile`, a method of a subclass, or
        another that it names; None for hidden states.

    Raises:
        TypeError: `model` is no language model of this package.

    Example:

    >>> import keras_recurrent
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> print(keras_recurrent.which_loss(model))
    hidden states
    >>> model.compile(weighted_metrics=["sparse_top_k_categorical_accuracy"])
    >>> keras_recurrent.which_loss(model).made_of
    'logits'
    """
    if not isinstance(model, LossWithoutLogits):
        raise TypeError(
            "`which_loss` takes a language model of keras_recurrent, such as `GriffinCausalLM`; "
            f"got {type(model).__name__}."
        )
    because = model.logits_because()
    return LossWay("logits" if because else "hidden states", because)


class _AskedFor:
    """What `compile` got beside the loss."""

    def __init__(self, metrics, others):
        self.metrics, self.others = metrics, others


class LossWithoutLogits:
    """Base class of a language model: with its default loss, a step makes no logits.

    The model then returns its hidden states inside `train_step` and `test_step`, and nowhere else;
    the loss finds the best tokens, of which the accuracy is made.
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
        others = [name for name in ("metrics", "loss_weights") if kwargs.get(name) is not None]
        # In an object, where Keras does not take the metrics for further ones of the model.
        self._asked_for = _AskedFor(weighted_metrics or (), others)
        super().compile(optimizer, loss, weighted_metrics=weighted_metrics, **kwargs)  # type: ignore[misc]

    def logits_because(self):
        """Why the loss is made of logits; None where it is not."""
        if not getattr(self, "compiled", False):
            return "the model is not compiled"
        if type(self.loss) is not TokenCrossentropy or self.loss.reduction != "sum_over_batch_size":
            return "the loss is not the default `TokenCrossentropy()`"
        if self._asked_for.others:
            return f"`compile` got `{self._asked_for.others[0]}`"
        for metric in self._asked_for.metrics:
            if type(metric) is not keras.metrics.SparseCategoricalAccuracy:
                name = metric if isinstance(metric, str) else type(metric).__name__
                return f"the metric {name!r} reads logits"
        embedding = self.backbone.token_embedding
        if type(embedding) is not ReversibleEmbedding:
            return f"`token_embedding` is a `{type(embedding).__name__}`"
        if getattr(embedding, "quantization_mode", None) is not None:
            return "`token_embedding` is quantized"
        if embedding.compute_dtype == "float16":
            return "in float16 gradients need the scale of the loss before they are made"
        for name in _STEPS:
            if getattr(type(self), name).__module__.partition(".")[0] != __name__.partition(".")[0]:
                return f"`{type(self).__name__}` has a `{name}` of its own"
        return None

    def train_step(self, *args, **kwargs):
        return self._without_logits(super().train_step, *args, **kwargs)  # type: ignore[misc]

    def test_step(self, *args, **kwargs):
        return self._without_logits(super().test_step, *args, **kwargs)  # type: ignore[misc]

    def _without_logits(self, step, *args, **kwargs):
        if self.logits_because() is not None:
            return step(*args, **kwargs)
        _under_way.model, _under_way.best = self, None
        try:
            return step(*args, **kwargs)
        finally:
            _under_way.model = _under_way.best = None

    def call(self, inputs, training=None, mask=None):
        if getattr(_under_way, "model", None) is self:
            return self.backbone(inputs, training=training)
        return super().call(inputs, training=training, mask=mask)  # type: ignore[misc]

    def compute_loss_and_updates(self, *args, **kwargs):
        """On JAX: the best tokens leave the function that is differentiated as `y_pred`."""
        found = super().compute_loss_and_updates(*args, **kwargs)  # type: ignore[misc]
        loss, (unscaled, y_pred, *rest) = found
        if getattr(_under_way, "model", None) is self:
            y_pred = _under_way.best
        return loss, (unscaled, y_pred, *rest)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if getattr(_under_way, "model", None) is not self:
            return super().compute_loss(x, y, y_pred, sample_weight, training)  # type: ignore[misc]
        loss, _under_way.best = self.loss_of_hidden_states(y_pred, y, sample_weight)
        # Keras's sum of one of several losses, which knows of the replicas of `tf.distribute`.
        losses = map(self._aggregate_additional_loss, (loss, *self.losses))
        return sum(ops.cast(of_all, loss.dtype) for of_all in losses)

    def loss_of_hidden_states(self, hidden_states, y, sample_weight=None):
        """The mean loss of tokens `y` `[B, T]`, and the tokens of the largest logits."""
        embedding = self.backbone.token_embedding
        weights = embedding.embeddings
        if not embedding.tie_weights:
            weights = ops.transpose(embedding.reverse_embeddings)
        hidden_states, weights = (
            ops.cast(t, embedding.reverse_dtype) for t in (hidden_states, weights)
        )
        tokens = ops.convert_to_tensor(y)
        if sample_weight is not None:
            sample_weight = ops.cast(sample_weight, "float32")
            if len(sample_weight.shape) == len(tokens.shape) + 1:
                sample_weight = ops.squeeze(sample_weight, -1)
        total, best = linear_crossentropy(
            hidden_states, weights, tokens, sample_weight, soft_cap=embedding.logit_soft_cap
        )
        return total / ops.sum(ops.ones_like(tokens, dtype=total.dtype)), best

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        if getattr(_under_way, "model", None) is not self:
            return super().compute_metrics(x, y, y_pred, sample_weight)  # type: ignore[misc]
        best = y_pred if keras.config.backend() == "jax" else _under_way.best
        if self._compile_metrics is not None and not self._compile_metrics.built:
            self._compile_metrics.build(y, best)
        matches = ops.equal(ops.cast(y, "int32"), best)
        for accuracy in self._asked_for.metrics:
            keras.metrics.Mean.update_state(accuracy, matches, sample_weight)
        return self.get_metrics_result()
