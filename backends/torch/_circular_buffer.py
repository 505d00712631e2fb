"""Circular buffers of a document's last tokens: the token at position p is in slot p mod C.

`position` [B] is the position of the next token. Slots not yet reached by a token are empty.
"""

import torch
from torch.nn.functional import pad

from ._common import fill_


def to_sequence(buffer, position, end, length):
    """The tokens of `buffer` [B, C, ...] as a sequence [B, length, ...] that ends at index `end`.

    The sequence is 0 everywhere else. This is the transpose of `from_sequence`.
    """
    capacity = buffer.shape[1]
    if capacity == 0:
        return buffer.new_zeros(buffer.shape[0], length, *buffer.shape[2:])
    age = end[:, None] - 1 - torch.arange(length, device=buffer.device)
    position = position[:, None]
    valid = (age >= 0) & (age < position.clamp_max(capacity))
    return take(buffer, (position - 1 - age) % capacity, valid)


def from_sequence(sequence, position, end, capacity):
    """The buffer [B, capacity, ...] of the last tokens of `sequence` before index `end`."""
    if capacity == 0:
        return sequence.new_empty(sequence.shape[0], 0, *sequence.shape[2:])
    age = ages(position, capacity)
    return take(sequence, (end[:, None] - 1 - age).clamp_min(0), age < position[:, None])


def from_whole_document(sequence, capacity):
    """`from_sequence` for sequences [B, T, G, K] of one document each, with two copies."""
    length = sequence.shape[1]
    if length <= capacity:
        return pad(sequence, (0, 0, 0, 0, 0, capacity - length))
    count = length % capacity if capacity else 0  # the last tokens, which are in the first slots
    buffer = sequence.new_empty(
        sequence.shape[0], capacity, *sequence.shape[2:]
    )  # `cat` is slower on GPUs
    buffer[:, :count] = sequence[:, length - count :]
    buffer[:, count:] = sequence[:, length - capacity : length - count]
    return buffer


def ages(position, capacity):
    """The age of each slot in tokens, [B, C]; at least `position` for an empty slot."""
    if capacity == 0:
        return position.new_empty(position.shape[0], 0)
    return (position[:, None] - 1 - torch.arange(capacity, device=position.device)) % capacity


def move(x, index):
    """x[b, index[b, i]]; x: [B, T, ...]; index: [B, I]. `torch.gather` would move scalars."""
    batch, length = x.shape[:2]
    index = index + length * torch.arange(batch, device=x.device)[:, None]
    moved = x.reshape(batch * length, -1).index_select(0, index.flatten())
    return moved.view(*index.shape, *x.shape[2:])


def take(x, index, valid):
    """`move`, with zeros where `valid` [B, I] is False."""
    return fill_(move(x, index), ~valid, 0)
