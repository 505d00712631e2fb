"""Parameters of models on torch, and the checks of `fit` before its first step."""

import sys
import threading
from typing import Any

import keras

from keras_recurrent.devices.torch_processes import MODULE_HINT, RejectsFullyShard, count_processes
from keras_recurrent.dispatch import BACKEND
from keras_recurrent.training.sixteen_bit_weights import check_16_bit_updates

if BACKEND == "torch":
    from keras_recurrent.training.captured_steps import CapturedSteps

_active_step = threading.local()  # `model` of the running training step, and its `weights`


class TorchTraining(RejectsFullyShard):
    """Mixin that registers parameters on torch, and checks `fit` on every backend.

    `fit` raises an error for an optimizer that cannot train 16-bit weights, and for several
    processes of torch without a distribution. On torch and NVIDIA GPUs, training steps after
    `compile(jit_compile=True)` are a CUDA graph, instead of a program of torch's compiler.

    KerasHub's models bypass torch when they set attributes. Without this class they have no
    parameters before `fit`, and `DistributedDataParallel(model)` finds none.
    """

    _captured_steps: Any = None

    def train_step(self, *args, **kwargs):
        """Trains on a batch: runs Keras's step, or the CUDA graph of `compile(jit_compile=True)`.

        Keras's step lists the weights of all layers three times; this list is made once.
        """
        _active_step.model, _active_step.weights = self, self.weights
        try:
            step = super().train_step  # type: ignore[misc]
            if self._captured_steps is not None:
                return self._captured_steps.run(step, *args, **kwargs)
            return step(*args, **kwargs)
        finally:
            _active_step.model = _active_step.weights = None

    def _is_in_step(self):
        return getattr(_active_step, "model", None) is self

    @property
    def weights(self):
        return _active_step.weights if self._is_in_step() else super().weights  # type: ignore[misc]

    def __setattr__(self, name, value):
        if name == "_torch_params":
            sys.modules["torch"].nn.Module.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _post_build(self):
        """Registers parameters if they have changed. Keras calls this in each `train_on_batch`.

        After the first call, the optimizer rejects other variables until the next `compile`.
        """
        registered = getattr(self, "_torch_params", None)
        if registered is not None and self.train_function is not None:  # type: ignore[attr-defined]
            return
        current = {id(v._value) for v in self.variables}  # type: ignore[attr-defined]
        if registered is None or {*map(id, registered._parameters.values())} != current:
            super()._post_build()  # type: ignore[misc]

    def named_modules(self, *args, **kwargs):
        """Yields modules as torch does, after registering parameters added since, as by LoRA."""
        known = None if self._is_in_step() else getattr(self, "_torch_params", None)
        if known is not None and set(known) != {v.path for v in self.variables}:  # type: ignore[attr-defined]
            self._track_variables()  # type: ignore[attr-defined]
        return super().named_modules(*args, **kwargs)  # type: ignore[misc]

    def make_train_function(self, force=False):
        """Makes Keras's train function, for one process.

        Raises:
            ValueError: the optimizer cannot train weights stored in 16 bits.
            RuntimeError: torch has several processes, and nothing averages their gradients.
        """
        processes = count_processes()
        if processes > 1 and keras.distribution.distribution() is None:
            raise RuntimeError(
                f"`fit` would train {processes} different models: `torch.distributed` has "
                f"{processes} processes, and nothing averages their gradients. "
                "`DistributedDataParallel(model)` averages only in calls of itself, not in `fit`. "
                f"{MODULE_HINT}"
            )
        if force or self.train_function is None:  # type: ignore[attr-defined]
            check_16_bit_updates(self.optimizer, self.trainable_variables)  # type: ignore[attr-defined]
            self._captured_steps = CapturedSteps(self) if self._captures_steps() else None
        return super().make_train_function(force)  # type: ignore[misc]

    def _captures_steps(self):
        """Returns True if a CUDA graph replaces torch's compiler."""
        is_own = type(self).train_step.__module__.startswith("keras_recurrent.")
        return BACKEND == "torch" and self.jit_compile and is_own and self._is_on_gpu()  # type: ignore[attr-defined]

    def _is_on_gpu(self):
        return all(v._value.is_cuda for v in self.variables)  # type: ignore[attr-defined]

    def _should_torch_compile(self):
        return super()._should_torch_compile() and not self._captures_steps()  # type: ignore[misc]

    def _predictions_of(self, y_pred):
        """Returns the argument `y_pred` of `compute_metrics` after `compute_loss`."""
        return y_pred
