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


def check_not_sharded(layer):
    """Raises an error for a Keras layer passed to `fully_shard`: Keras calls no torch hooks."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(layer, fsdp.FSDPModule):
        raise RuntimeError(
            f"`fully_shard` got {layer.name!r}, a Keras layer. Keras calls layers without torch's "
            "hooks, which gather the weights and reduce their gradients, and would compute with "
            f"the local weights. {MODULE_HINT}"
        )
