"""Moves real tokens before padding and restores their order, for operations on neighbors."""

import functools

import torch

from ._circular_buffer import take
from ._common import kind_masks


class RealTokens:
    """Permutation that moves the real tokens of each sequence before its padding.

    Attributes:
        nth: [B, T], the index of token t among real tokens; at padding, of the last one before.
        count: [B, 1], the number of real tokens.
        target: [B, T], the target index of token t.
        order: [B, T], the token moved to each index.
        filled: [B, T], mask of the first `count` indices, to which real tokens are moved.
    """

    def __init__(self, token_kind):
        self.starts, padding = kind_masks(token_kind)
        index = torch.arange(token_kind.shape[1], device=token_kind.device)
        self.real = ~padding
        self.nth = nth = self.real.cumsum(1) - 1
        self.count = nth[:, -1:] + 1
        # Padding is moved after the real tokens, so that this is a permutation.
        self.target = torch.where(padding, self.count + index - 1 - nth, nth)
        order = torch.empty_like(self.target)
        self.order = order.scatter_(1, self.target, index.expand_as(order))
        self.filled = index < self.count

    @functools.cached_property
    def document(self):
        """The number of documents started up to the token moved to each index, [B, T]."""
        return self.starts.cumsum(1).gather(1, self.order)

    def to_front(self, x):
        """x [B, T, ...] with the real tokens first, then zeros."""
        return take(x, self.order, self.filled)

    def put_back(self, x):
        """The inverse and the transpose of `to_front`, with zeros at padding."""
        return take(x, self.target, self.real)
