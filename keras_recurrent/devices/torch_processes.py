"""What Keras cannot know of several processes of torch. Imports nothing of torch by itself."""

import sys
from typing import Any

HOW = (
    "Make `module = keras_recurrent.devices.torch_modules.TorchModule(model)` and train that in a "
    "loop of your own, with `torch.nn.parallel.DistributedDataParallel(module)` or "
    "`torch.distributed.fsdp.fully_shard`; its docstring shows both."
)


def number_of_processes():
    """How many processes `torch.distributed` has; 1 where it is not in use."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def check_not_sharded(layer):
    """Raises where `fully_shard` got a Keras layer, which calls none of the hooks of torch."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(layer, fsdp.FSDPModule):
        raise RuntimeError(
            f"`fully_shard` got {layer.name!r}, a Keras layer. Keras calls layers without torch's "
            "hooks, which gather the weights and reduce their gradients, and would compute with "
            f"weights of its own. {HOW}"
        )
