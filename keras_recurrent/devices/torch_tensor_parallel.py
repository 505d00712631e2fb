"""Tensor-parallel styles of torch for the linear layers of a `TorchModule`."""

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class ColumnParallel(ParallelStyle):
    """Splits the outputs of a linear layer over the devices, for torch's `parallelize_module`.

    ```
    y_i = W_i x + b_i
    ```

    `torch.distributed.tensor.parallel.ColwiseParallel` takes only modules of torch, whose weights
    are `[outputs, inputs]`; kernels of Keras are `[inputs, outputs]`. Device i has W_i and b_i of
    its channels or heads and computes only these, including in the operations of this package, up
    to a `RowParallel` layer. torch raises an error for heads that cannot be split evenly.

    Activations are `DTensor`s, which have global shapes. Run the whole step inside
    `implicit_replication`; `distribute_module` replicates weights that are not in the plan:

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
                f"`{type(self).__name__}` splits linear layers with a `kernel` [inputs, outputs]; "
                f"got {getattr(module, 'layer', module)}."
            )
        return distribute_module(module, device_mesh, self._split, None, self._gather)

    def _split(self, name, module, mesh):
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            placement = getattr(self, parameter_name, Replicate())
            split = distribute_tensor(parameter.detach(), mesh, [placement])
            module.register_parameter(
                parameter_name, torch.nn.Parameter(split, requires_grad=parameter.requires_grad)
            )

    def _gather(self, module, output, mesh):
        return output


class RowParallel(ColumnParallel):
    """Splits the inputs of a linear layer that follows a `ColumnParallel` one.

    ```
    y = sum_i W_i x_i + b
    ```

    The only communication is the sum of the devices' partial outputs.

    Raises:
        ValueError: the plan names a module without a kernel of two axes.
    """

    kernel = Shard(0)
    bias = Replicate()

    def _gather(self, module, output, mesh):
        return output.redistribute(placements=[Replicate()] * mesh.ndim)
