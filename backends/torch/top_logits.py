"""The largest logits of each sequence, and the log of the sum of the exponentials of all logits.

On a CPU, `torch.topk` keeps any of several equal numbers. On a GPU, it keeps those with the lowest
indices, and with `sorted=False` returns them in the order of their indices.
"""

import torch
from torch import Tensor


def top_logits(x, count):
    """x: [B, V]. Returns (float32 values [B, count], int32 indices [B, count], log sum [B]).

    Equal numbers are in the order of their indices.
    """
    x = x.float()
    values, indices = _largest(x, count)
    return values, indices, torch.logsumexp(x, dim=-1)


@torch.library.custom_op("keras_recurrent::largest", mutates_args=())
def _largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if count == x.shape[-1]:
        values, indices = x.sort(dim=-1, descending=True, stable=True)
        return values, indices.int()
    if x.device.type == "cpu":
        values, indices = x.topk(count + 1)
        is_equal = values[:, 1:] == values[:, :-1]
        if not is_equal.any():
            return values[:, :count].contiguous(), indices[:, :count].int()
        for row in is_equal[:, -1].nonzero()[:, 0]:
            lowest = values[row, count]
            first = int((values[row] > lowest).sum())
            indices[row, first:count] = (x[row] == lowest).nonzero()[: count - first, 0]
        indices = indices[:, :count].sort(dim=-1).values
    else:
        indices = x.topk(count, sorted=False).indices
    values, order = x.gather(-1, indices).sort(dim=-1, descending=True, stable=True)
    return values, indices.gather(-1, order).int()


@_largest.register_fake
def _(x, count):
    shape = x.shape[0], count
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)
