"""Operations on `DTensor`s that are split over processes, and on the whole: how far they differ.

What an operation computes of the whole is judged elsewhere.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from keras_recurrent import ops
from keras_recurrent.backends.constants import PADDING

B, T, D, H, G, K = 2, 9, 4, 4, 2, 3
BTD, HEADS, FEWER = (B, T, D), (B, T, H, K), (B, T, G, K)
# The shapes of an operation's tensors, and which axis of each has the channels; None: none has.
OPERATIONS = {
    "linear_scan": ([BTD, BTD], [2, 2]),
    "rg_lru": ([BTD, BTD, BTD, (D,)], [2, 2, 2, 0]),
    "causal_conv1d": ([BTD, (3, D), (D,)], [2, 1, 0]),
    "complex_linear_scan": ([(B, T, 2 * D), BTD, BTD], None),
    "gated_linear_attention": ([HEADS] * 4, [2] * 4),
    "lightning_attention": ([HEADS] * 3 + [(H,)], [2, 2, 2, 0]),
    "sliding_window_attention": ([HEADS, FEWER, FEWER], [2, 2, 2]),
}


def draw(operation):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in OPERATIONS[operation][0]]
    decay = {"linear_scan": 1, "complex_linear_scan": 1, "gated_linear_attention": 3}
    place = 3 if operation == "lightning_attention" else decay.get(operation)
    if place is not None:
        tensors[place] = -tensors[place].abs()
    kind = (torch.rand((B, T), generator=generator) * 3).to(torch.int8)
    weights = torch.randn(tensors[0].shape, generator=generator)
    weights[kind == PADDING] = 0
    return tensors, kind, weights


def computed(operation, tensors, kind, weights, implementation):
    """The output and the gradients of all tensors. The state's gradient is missing.

    At padding, where outputs mean nothing, the weights are 0.
    """
    arguments = {"sliding_window": 4} if operation == "sliding_window_attention" else {}
    tensors = [t.detach().requires_grad_() for t in tensors]
    function = getattr(ops, operation)
    output = function(*tensors, token_kind=kind, implementation=implementation, **arguments)[0]
    gradients = torch.autograd.grad((output * weights).sum(), tensors, allow_unused=True)
    return [output * (weights != 0), *(g for g in gradients if g is not None)]


def compare_split(operation, implementation, mesh, by_channels):
    tensors, kind, weights = draw(operation)
    wanted = computed(operation, tensors, kind, weights, implementation)
    axes = OPERATIONS[operation][1] if by_channels else [0 if t.ndim > 2 else None for t in tensors]

    def split(tensor, axis):
        return distribute_tensor(tensor, mesh, [Replicate() if axis is None else Shard(axis)])

    shards = [split(t, axis) for t, axis in zip(tensors, axes, strict=True)]
    of_weights, of_kind = split(weights, axes[0]), split(kind, None if by_channels else 0)
    found = computed(operation, shards, of_kind, of_weights, implementation)
    assert found[0].placements == (Shard(axes[0]),), found[0].placements
    assert all(isinstance(x, DTensor) for x in found)
    return max(float((x.full_tensor() - y).abs().max()) for x, y in zip(found, wanted, strict=True))


def compare(implementation, rank, processes, folder):
    """How far each operation is off, by batch and by channels."""
    mesh = init_device_mesh("cpu", (processes,))
    found = {}
    for operation, (_, channels) in OPERATIONS.items():
        if implementation == "triton" and operation == "complex_linear_scan":
            continue  # there is none
        for by_channels in (False, True) if channels else (False,):
            split = "channels" if by_channels else "batch"
            found[f"{operation} {split}"] = compare_split(
                operation, implementation, mesh, by_channels
            )
    return found
