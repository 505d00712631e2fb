"""Training steps on torch whose forward and backward passes are CUDA graphs."""

import warnings
from typing import Any, NamedTuple

import keras
import torch

from keras_recurrent.devices.cuda_graphs import capture
from keras_recurrent.devices.torch_processes import count_processes
from keras_recurrent.dispatch import chosen_name
from keras_recurrent.layers.torch_calls import hook_reason, modules_of

MAX_GRAPHS = 2  # each owns a gradient of every weight


class CapturedPasses(NamedTuple):
    """CUDA graph of a forward and a backward pass.

    Attributes:
        key: the shapes, dtypes and chosen implementation for which it was captured.
        batch: its inputs, `(x, y, sample_weight)`.
        graph: the graph, which reads the inputs and the weights, and overwrites the results.
        results: loss, predictions for the metrics, and gradients.
    """

    key: Any
    batch: Any
    graph: Any
    results: Any


class CapturedSteps:
    """Training steps of `compile(jit_compile=True)` on an NVIDIA GPU.

    The host starts all kernels of the forward and the backward pass by one CUDA graph. Clipping,
    the optimizer and the metrics run after it, kernel by kernel.

    A graph is captured in the second of two consecutive steps with equal shapes, so that a last,
    smaller batch of an epoch needs none. Steps of further shapes run eagerly. All graphs share one
    memory pool, as each step reads the results of its graph before the next one runs.

    Args:
        model: a compiled model of this package.
    """

    def __init__(self, model):
        self._model, self._modules = model, modules_of(model)
        self._weights: list[Any] = []  # for which the graphs were captured
        self._graphs: list[CapturedPasses] = []
        self._previous: Any = None  # the key of the previous step
        self._reason = _uncapturable_reason(model)
        self._reported: str | None = None

    def run(self, eager_step, data):
        """Trains on a batch; returns the logs.

        Args:
            eager_step: Keras's `train_step`, for models without graphs.
            data: its argument, `(x, y, sample_weight)`.
        """
        model, variables = self._model, self._model.trainable_weights
        weights = [variable._value for variable in variables]
        if reason := self._reason or _hook_on_weights(weights) or hook_reason(self._modules):
            self._warn(reason)
            return eager_step(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, predictions, gradients = self._compute((x, y, sample_weight), weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        num_samples = next(t.shape[0] for t in keras.tree.flatten(x) if t is not None)
        model._loss_tracker.update_state(loss, sample_weight=num_samples)
        with torch.no_grad():
            model.optimizer.apply(gradients, variables)
        return model.compute_metrics(x, y, predictions, sample_weight=sample_weight)

    def _warn(self, reason):
        """Reports a reason for eager steps once."""
        if reason != self._reported:
            self._reported = reason
            warnings.warn(f"`jit_compile=True` captures no CUDA graph: {reason}.", stacklevel=4)

    def _compute(self, batch, weights):
        """Returns `(loss, predictions, gradients)`. The gradients are valid until the next step."""
        batch = _map_tensors(keras.ops.convert_to_tensor, batch)
        key = _map_tensors(lambda t: (*t.shape, t.dtype), batch), chosen_name()
        if [*map(id, weights)] != [*map(id, self._weights)]:
            self._weights, self._previous = weights, None
            self._graphs.clear()
        captured = next((graph for graph in self._graphs if graph.key == key), None)
        if captured is None and key == self._previous and len(self._graphs) < MAX_GRAPHS:
            captured = self._capture(key, batch, weights)
        self._previous = key
        if captured is None:
            return self._run_passes(batch, weights)
        for buffer, tensor in zip(*map(keras.tree.flatten, (captured.batch, batch)), strict=True):
            if buffer is not None:
                buffer.copy_(tensor)
        captured.graph.replay()
        loss, predictions, gradients = captured.results
        return loss, _map_tensors(torch.clone, predictions), gradients

    def _capture(self, key, batch, weights):
        """Returns the `CapturedPasses` for batches like this one, or None if torch raises."""
        buffers = _map_tensors(torch.clone, batch)
        pool = self._graphs[0].graph.pool() if self._graphs else None
        try:
            graph, results = capture(
                lambda: self._run_passes(buffers, weights), weights[0].device, pool
            )
        except RuntimeError as error:  # such as a layer that waits for the device
            self._reason = f"torch could not capture the step: {error}"
            self._warn(self._reason)
            return None
        self._graphs.append(CapturedPasses(key, buffers, graph, results))
        return self._graphs[-1]

    def _run_passes(self, batch, weights):
        """Computes loss, predictions and gradients, as Keras's `train_step`."""
        model, (x, y, sample_weight) = self._model, batch
        for weight in weights:
            weight.grad = None
        with torch.enable_grad():
            y_pred = model(x, training=True)
            loss = model.compute_loss(x, y, y_pred, sample_weight, training=True)
            predictions = model._predictions_of(y_pred)
            model.optimizer.scale_loss(loss).backward()
        gradients = [weight.grad for weight in weights]
        for weight in weights:  # the next step must not add to them
            weight.grad = None
        return loss.detach(), _map_tensors(torch.detach, predictions), gradients


def _map_tensors(function, tensors):
    """Maps nested tensors, and leaves None as it is."""
    return keras.tree.map_structure(lambda t: None if t is None else function(t), tensors)


def _uncapturable_reason(model):
    """Reason why a graph of the model would not compute the results of eager steps, or None."""
    if keras.distribution.distribution() is not None or count_processes() > 1:
        return "the model is distributed"
    if not model.trainable_weights:
        return "the model has no trainable weights"
    for layer in model._flatten_layers(include_self=False):
        if layer._seed_generators:
            return f"`{layer.name}` draws random numbers"
        if layer._remat_mode is not None and layer._remat_mode.mode is not None:
            return f"`{layer.name}` was made in a `keras.RematScope`"
    return None


def _hook_on_weights(weights):
    has_hook = any(w._backward_hooks or w._post_accumulate_grad_hooks for w in weights)
    return "a weight has a hook" if has_hook else None
