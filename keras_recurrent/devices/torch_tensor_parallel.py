"""Tensor parallel plans of torch for the linear maps of a `TorchModule`."""

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class ColumnParallel(ParallelStyle):
    """A linear map whose outputs are split over the devices, for torch's `parallelize_module`.

    ```
    y_i = W_i x + b_i
    ```

    As `torch.distributed.tensor.parallel.ColwiseParallel`, which takes modules of torch alone,
    whose weights are `[outputs, inputs]`: kernels of Keras are `[inputs, outputs]`. A device i has
    W_i and b_i, those of its channels or heads, and works on them alone, in our operations as
    well, up to a `RowParallel` map. torch refuses heads that cannot be split evenly.

    Activations are `DTensor`s, which have the shapes of the whole. So all of a step runs inside
    `implicit_replication`, and what the plan does not name is replicated by `distribute_module`:

    ```
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import parallelize_module

    module = TorchModule(model)
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    plan = {f"block_*.mlp.{name}": ColumnParallel() for name in ("gate_proj", "up_proj")}
    plan["block_*.mlp.down_proj"] = RowParallel()
    distribute_module(parallelize_module(module, mesh, plan), mesh)
    with implicit_replication():
        loss = model.loss(y, module(x), sample_weight)
        loss.backward()
    ```

    Raises:
        ValueError: the plan names a module without a kernel of two axes.
    """

    kernel: Any = Shard(1)
    bias: Any = Shard(0)

    def _apply(self, module, device_mesh):
        kernel = getattr(module, "kernel", None)
        if not isinstance(kernel, torch.nn.Parameter) or kernel.ndim != 2:
            raise ValueError(
                f"`{type(self).__name__}` splits linear maps, with a `kernel` [inputs, outputs]; "
                f"got {getattr(module, 'layer', module)}."
            )
        return distribute_module(module, device_mesh, self._split, None, self._gather)

    def _split(self, name, module, mesh):
        for of_parameter, parameter in list(module.named_parameters(recurse=False)):
            placement = getattr(self, of_parameter, Replicate())
            split = distribute_tensor(parameter.detach(), mesh, [placement])
            module.register_parameter(
                of_parameter, torch.nn.Parameter(split, requires_grad=parameter.requires_grad)
            )

    def _gather(self, module, output, mesh):
        return output


class RowParallel(ColumnParallel):
    """A linear map whose inputs are split over the devices, behind a `ColumnParallel` one.

    ```
    y = sum_i W_i x_i + b
    ```

    The devices' parts are added, which is all that they exchange.

    Raises:
        ValueError: the plan names a module without a kernel of two axes.
    """

    kernel = Shard(0)
    bias = Replicate()

    def _gather(self, module, output, mesh):
        return output.redistribute(placements=[Replicate()] * mesh.ndim)
