"""Sharding rules of custom operators for `DTensor`s, split by batch or by channels.

The rules of an operator follow from the names of its dimensions, such as "B T D". Batch and
channels (or heads) are independent in all of them; time is not, nor is the inside of a head.
"""

from typing import Any

import torch

DTensor: Any = None
if torch.distributed.is_available():
    import torch.distributed.tensor
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    DTensor = torch.distributed.tensor.DTensor


def register(operator, tensors, results, channels, gradient_of=None):
    """Registers the sharding rules of an operator.

    Args:
        operator: the result of `torch.library.custom_op`. Its tensors come before its options.
        tensors: the dimension names of each tensor that it takes, such as "B T D".
        results: the dimension names of each tensor that it returns.
        channels: names of dimensions other than "B" whose elements are independent; all are split
            together.
        gradient_of: if results are gradients, the indices in `tensors` of the differentiated
            tensors, or None each. A gradient without the split dimension, such as that of a bias,
            is the sum over the devices.
    """
    if DTensor is None:
        return
    whole = Replicate() if gradient_of is None else Partial()

    @register_sharding(operator._opoverload)
    def rule(*arguments):
        options = [None] * (len(arguments) - len(tensors))
        given = arguments[: len(tensors)]

        def placements(split):
            """Placements if these dimensions are split."""
            inputs = [
                None if x is None else _placement(names, split, Replicate())
                for x, names in zip(given, tensors, strict=True)
            ]
            outputs = [_placement(names, split, whole) for names in results]
            for i, index in enumerate(gradient_of or ()):
                if index is not None and given[index] is None:
                    outputs[i] = Replicate()  # this gradient is never read
            return outputs, inputs + options

        whole_everywhere = [Replicate()] * len(results), placements(())[1]
        splits = [("B",)]
        if channels and _can_split(given, tensors, channels):
            splits.append(channels)
        return [whole_everywhere, *map(placements, splits)]


def _placement(names, split, otherwise):
    axes = [i for i, name in enumerate(names.split()) if name in split]
    return Shard(axes[0]) if axes else otherwise


def _can_split(given, tensors, channels):
    """Returns True if the channels of all tensors can be split evenly."""
    return not any(
        x.shape[i] % size
        for x, names in zip(given, tensors, strict=True)
        if x is not None
        for i, name in enumerate(names.split())
        if name in channels
        for size in x.mesh.shape
    )


def _register_log_sigmoid():
    """Registers an elementwise rule for the one torch operator used here that lacks one."""

    @register_sharding(torch.ops.aten.log_sigmoid_backward.default)
    def rule(d_output, x, buffer):
        placements = [Replicate(), *(Shard(axis) for axis in range(len(x.shape)))]
        kept = len(buffer.shape) == len(x.shape)  # on a CPU; empty on other devices
        return [([p], [p, p, p if kept else Replicate()]) for p in placements]


if DTensor is not None:
    _register_log_sigmoid()


def is_sharded(tensor):
    """Returns True if a tensor is a DTensor, whose memory cannot be viewed."""
    return DTensor is not None and isinstance(tensor, DTensor)


def as_dtensors(tensors):
    """Converts plain tensors among DTensors, the zeros that autograd makes of missing gradients."""
    mesh = None if DTensor is None else _mesh(tensors)
    if mesh is None:
        return tensors
    whole = [Replicate()] * mesh.ndim
    return [
        DTensor.from_local(x, mesh, whole, run_check=False)
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
        else x
        for x in tensors
    ]


def _mesh(tensors):
    for x in tensors:
        if isinstance(x, DTensor):
            return x.device_mesh
    return None
