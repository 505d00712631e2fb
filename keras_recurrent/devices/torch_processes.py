"""Checks for torch programs of several processes. Does not import torch."""

import sys
from typing import Any

MODULE_HINT = (
    "Make `module = keras_recurrent.devices.torch_modules.TorchModule(model)` and train it in a "
    "custom loop, with `torch.nn.parallel.DistributedDataParallel(module)` or "
    "`module.fully_shard()`; its docstring shows both."
)


def count_processes():
    """Returns the number of processes of `torch.distributed`, 1 if it is not initialized."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


class RejectsFullyShard:
    """Mixin for Keras layers and models: raises an error in torch's `fully_shard(layer)`.

    `fully_shard` makes a subclass of the layer's class, with hooks that Keras does not call.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and issubclass(cls, fsdp.FSDPModule):
            raise RuntimeError(
                f"`fully_shard` got a {cls.__bases__[-1].__name__}, a Keras layer. Keras calls "
                "layers without torch's hooks, which gather the weights and reduce their "
                f"gradients, and would compute with the local weights. {MODULE_HINT}"
            )
