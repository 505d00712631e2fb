"""Models as modules of torch: their parameters, and `fit` where there are several processes."""

import sys

import keras

from keras_recurrent.devices.torch_processes import MODULE_HINT, check_not_sharded, count_processes


class TorchTraining:
    """Base class of the models: right, or refused, where torch has several processes.

    A model with a `__call__` calls `check_not_sharded` there, and others are a
    `CheckedTorchTraining`: each nested call that torch's compiler follows counts to its limit.

    KerasHub's models set attributes past torch, and so have no parameters until `fit` looks for
    them once more: `DistributedDataParallel(model)` finds none. Here they have.
    """

    def __setattr__(self, name, value):
        if name == "_torch_params":
            sys.modules["torch"].nn.Module.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def named_modules(self, *args, **kwargs):
        """As in torch, by which it finds parameters: those since added, as of LoRA, included."""
        known = getattr(self, "_torch_params", None)
        if known is not None and set(known) != {v.path for v in self.variables}:  # type: ignore[attr-defined]
            self._track_variables()  # type: ignore[attr-defined]
        return super().named_modules(*args, **kwargs)  # type: ignore[misc]

    def make_train_function(self, force=False):
        """As in Keras, for one process.

        Raises:
            RuntimeError: torch has several, and nothing averages their gradients.
        """
        processes = count_processes()
        if processes > 1 and keras.distribution.distribution() is None:
            raise RuntimeError(
                f"`fit` would train {processes} different models: `torch.distributed` has "
                f"{processes} processes, and nothing averages their gradients, also beside "
                f"`DistributedDataParallel(model)`, which averages in its own calls. {MODULE_HINT}"
            )
        return super().make_train_function(force)  # type: ignore[misc]


class CheckedTorchTraining(TorchTraining):
    """The same for a model without a `__call__` of its own."""

    def __call__(self, *args, **kwargs):
        check_not_sharded(self)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]
