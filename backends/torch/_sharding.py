"""How custom operators run on `DTensor`s: on each device's rows of the batch, or its channels.

The rules of an operator follow from the names of its dimensions, such as "b t d". Batch and
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
    """Lets an operator take DTensors.

    Args:
        operator: what `torch.library.custom_op` returned. Its tensors come before its options.
        tensors: for each tensor that it takes, the names of its dimensions, such as "b t d".
        results: the same for each tensor that it returns.
        channels: names of dimensions beside "b" whose members are independent, all split together.
        gradient_of: where results are gradients, the places of what they belong to among
            `tensors`, None for what is not there. One without the dimension that is split, such as
            a bias's, is then the sum of what the devices have.
    """
    if DTensor is None:
        return
    whole = Replicate() if gradient_of is None else Partial()

    @register_sharding(operator._opoverload)
    def found(*arguments):
        options = [None] * (len(arguments) - len(tensors))
        given = arguments[: len(tensors)]

        def placements(split):
            """The rule where these dimensions are split."""
            inputs = [
                None if x is None else _placement(names, split, Replicate())
                for x, names in zip(given, tensors, strict=True)
            ]
            outputs = [_placement(names, split, whole) for names in results]
            for i, place in enumerate(gradient_of or ()):
                if place is not None and given[place] is None:
                    outputs[i] = Replicate()  # nobody asks for it
            return outputs, inputs + options

        whole_everywhere = [Replicate()] * len(results), placements("")[1]
        splits = ["b", channels] if channels and _can_split(given, tensors, channels) else ["b"]
        return [whole_everywhere, *map(placements, splits)]


def _placement(names, split, otherwise):
    places = [i for i, name in enumerate(names.split()) if name in split]
    return Shard(places[0]) if places else otherwise


def _can_split(given, tensors, channels):
    """Whether the channels of all tensors can be split evenly."""
    return not any(
        x.shape[i] % size
        for x, names in zip(given, tensors, strict=True)
        if x is not None
        for i, name in enumerate(names.split())
        if name in channels
        for size in x.mesh.shape
    )


def _register_log_sigmoid():
    """Of torch's own operators that we need, DTensors lack this one: element by element."""

    @register_sharding(torch.ops.aten.log_sigmoid_backward.default)
    def found(d_output, x, buffer):
        places = [Replicate(), *(Shard(axis) for axis in range(len(x.shape)))]
        kept = len(buffer.shape) == len(x.shape)  # on a CPU; elsewhere it is empty
        return [([p], [p, p, p if kept else Replicate()]) for p in places]


if DTensor is not None:
    _register_log_sigmoid()


def is_sharded(tensor):
    """Whether a tensor is a DTensor, of whose memory there are no views."""
    return DTensor is not None and isinstance(tensor, DTensor)


def alike(tensors):
    """Plain tensors among DTensors as such: autograd makes zeros of gradients that are missing."""
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
