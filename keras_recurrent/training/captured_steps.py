"""Training steps on torch whose forward and backward passes are one CUDA graph."""

import gc
import warnings
from typing import Any

import keras
import torch

from keras_recurrent.devices.cuda_graphs import capture
from keras_recurrent.dispatch import chosen_name
from keras_recurrent.layers.torch_calls import hook_reason, modules_of


class CapturedSteps:
    """Training steps of `compile(jit_compile=True)` on an NVIDIA GPU.

    The host launches the forward and the backward pass as one CUDA graph. Clipping, the optimizer
    and the metrics run after it, kernel by kernel.

    One graph is captured, in the second of two consecutive steps with equal shapes, so that the
    last, smaller batch of an epoch does not cause a capture. Steps of other shapes run eagerly.
    """

    def __init__(self, model):
        self._model, self._modules = model, modules_of(model)
        self._previous: Any = None  # key of the previous step
        self._captured: Any = None  # key, buffers of the batch, graph and its results
        self._is_eager = False

    def run(self, eager_step, data):
        """Trains on a batch `data`, by Keras's `eager_step` if there is no graph; returns logs."""
        model, variables = self._model, self._model.trainable_weights
        batch = keras.utils.unpack_x_y_sample_weight(data)
        batch = _map_tensors(keras.ops.convert_to_tensor, batch)
        if self._is_eager or not self._find_or_capture(batch, variables):
            return eager_step(batch)
        _, buffers, graph, (loss, predictions, gradients) = self._captured
        for buffer, tensor in zip(*map(keras.tree.flatten, (buffers, batch)), strict=True):
            if buffer is not None:
                buffer.copy_(tensor)
        graph.replay()
        for variable, gradient in zip(variables, gradients, strict=True):
            variable._value.grad = gradient
        x, y, sample_weight = batch
        num_samples = next(t.shape[0] for t in keras.tree.flatten(x) if t is not None)
        model._loss_tracker.update_state(loss, sample_weight=num_samples)
        with torch.no_grad():
            model.optimizer.apply(gradients, variables)
        return model.compute_metrics(x, y, predictions, sample_weight=sample_weight)

    def _find_or_capture(self, batch, variables):
        """Returns True if there is a graph for batches like this one."""
        weights = [variable._value for variable in variables]
        if any(w._backward_hooks or w._post_accumulate_grad_hooks for w in weights):
            return self._switch_to_eager("a weight has a hook")
        if reason := hook_reason(self._modules, with_gradients=True):
            return self._switch_to_eager(reason)
        shapes = _map_tensors(lambda t: (*t.shape, t.dtype), batch)
        addresses = [(v._value.data_ptr(), v.trainable) for v in self._model.weights]
        key = shapes, addresses, chosen_name()
        is_repeated, self._previous = key == self._previous, key
        if self._captured is not None:
            return key == self._captured[0]
        return is_repeated and self._capture(key, batch, variables)

    def _capture(self, key, batch, variables):
        """Captures the graph; returns True on success."""
        if keras.distribution.distribution() is not None:
            return self._switch_to_eager("`keras.distribution` is active")
        for layer in self._model._flatten_layers(include_self=False):
            if layer._seed_generators:  # each replay would have the same random numbers
                return self._switch_to_eager(f"`{layer.name}` draws random numbers")
        buffers = _map_tensors(torch.clone, batch)
        for variable in variables:
            variable._value.grad = None  # frees its memory
        device = self._model.weights[0]._value.device
        try:
            graph, results = capture(lambda: self._run_passes(buffers, variables), device)
        except RuntimeError as error:  # for example, a layer waits for the device
            # Keras and the end of the capture raise further errors; the first one is the cause.
            while isinstance(error.__context__, RuntimeError):
                error = error.__context__
            cause = str(error).partition("\n")[0]
        else:
            self._captured = key, buffers, graph, results
            return True
        return self._switch_to_eager(f"torch could not capture the step: {cause}")

    def _run_passes(self, batch, variables):
        """Computes loss, predictions and gradients, as Keras's `train_step`."""
        model, (x, y, sample_weight) = self._model, batch
        weights = [variable._value for variable in variables]
        # torch accumulates the gradient of a tensor on the stream of the tensor's first forward
        # pass. For weights, that is the default stream if eager steps ran before, and a captured
        # stream cannot wait for it. The leaves are new tensors that share the weights' memory.
        leaves = [weight.detach().requires_grad_() for weight in weights]
        try:
            for variable, leaf in zip(variables, leaves, strict=True):
                variable._value = leaf
            with torch.enable_grad():
                y_pred = model(x, training=True)
                loss = model._compute_loss(x, y, y_pred, sample_weight, training=True)
                predictions = model._predictions_of(y_pred)
                # An optimizer may scale gradients in place, and `torch.autograd.grad` may return
                # one tensor for two weights.
                model.optimizer.scale_loss(loss).backward()
        finally:
            for variable, weight in zip(variables, weights, strict=True):
                variable._value = weight
        gradients = [leaf.grad for leaf in leaves]
        return loss.detach(), _map_tensors(torch.detach, predictions), gradients

    def _switch_to_eager(self, reason):
        """Makes all further steps eager, and frees the memory of the graph; returns False."""
        self._is_eager, self._captured = True, None
        gc.collect()
        torch.cuda.empty_cache()
        text = f"`jit_compile=True`: steps run eagerly until the next `compile`: {reason}."
        warnings.warn(text, stacklevel=5)
        return False


def _map_tensors(function, tensors):
    """Maps nested tensors, and leaves None as it is."""
    return keras.tree.map_structure(lambda t: None if t is None else function(t), tensors)
