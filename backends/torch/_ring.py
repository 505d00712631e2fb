"""Ring buffers of a document's last tokens: the token at position p is in slot p mod C.

`position` [B] is the position of the next token. Slots that no token has reached hold nothing.
"""

import torch
from torch.nn.functional import pad


def to_row(ring, position, end, length):
    """The tokens of ring [B, C, ...] in a row [B, length, ...], the last of them at `end` - 1.

    The row is 0 everywhere else. This is the transpose of `to_ring`.
    """
    capacity = ring.shape[1]
    if capacity == 0:
        return ring.new_zeros(ring.shape[0], length, *ring.shape[2:])
    age = end[:, None] - 1 - torch.arange(length, device=ring.device)
    position = position[:, None]
    kept = (age >= 0) & (age < position.clamp_max(capacity))
    return take(ring, (position - 1 - age) % capacity, kept)


def to_ring(row, position, end, capacity):
    """The ring [B, capacity, ...] that holds the last tokens of `row` before index `end`."""
    if capacity == 0:
        return row.new_empty(row.shape[0], 0, *row.shape[2:])
    age = ages(position, capacity)
    return take(row, (end[:, None] - 1 - age).clamp_min(0), age < position[:, None])


def of_whole_document(row, capacity):
    """`to_ring` of rows [B, T, G, K] that are a document each, in two copies."""
    length = row.shape[1]
    if length <= capacity:
        return pad(row, (0, 0, 0, 0, 0, capacity - length))
    count = length % capacity if capacity else 0  # of the tokens in the first slots, the last ones
    ring = row.new_empty(row.shape[0], capacity, *row.shape[2:])  # `cat` is slower on GPUs
    ring[:, :count] = row[:, length - count :]
    ring[:, count:] = row[:, length - capacity : length - count]
    return ring


def ages(position, capacity):
    """How many tokens came after the one in each slot, [B, C]; at least `position`: it is empty."""
    if capacity == 0:
        return position.new_empty(position.shape[0], 0)
    return (position[:, None] - 1 - torch.arange(capacity, device=position.device)) % capacity


def take(x, index, valid):
    """x[b, index[b, i]] where `valid`, else 0; x: [B, T, ...]; index, valid: [B, I]."""
    batch, length = x.shape[:2]
    index = index + length * torch.arange(batch, device=x.device)[:, None]
    taken = x.reshape(batch * length, -1).index_select(0, index.flatten())
    taken = taken.masked_fill_(~valid.reshape(-1, 1), 0)
    return taken.view(*index.shape, *x.shape[2:])
