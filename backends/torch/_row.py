"""The keys, values and queries of attention, with the real tokens of each row in front."""

import functools

import torch

from ..constants import PADDING, STARTS
from . import _ring
from ._common import accumulation_dtype


def attend(forward, q, k, v, sliding_window, initial_state, token_kind, capacity):
    """The output and the state, from an operator that takes and returns the parts of the state."""
    state = initial_state or {"key": None, "value": None, "position": None}
    if initial_state is not None:
        capacity = state["key"].shape[1]
    elif capacity is None and sliding_window is not None:
        capacity = sliding_window - 1
    keeps = capacity is not None
    output, key, value, position, *_ = forward(
        q,
        k,
        v,
        state["key"],
        state["value"],
        state["position"],
        token_kind,
        sliding_window,
        capacity if keeps else 0,
    )
    return output, {"key": key, "value": value, "position": position} if keeps else {}


def fake_results(q, k, v, capacity):
    """The results of such an operator, without their values."""
    batch, length, heads, _ = q.shape
    groups = k.shape[2]
    return (
        q.new_empty(batch, length, heads, v.shape[3]),
        k.new_empty(batch, capacity, groups, k.shape[3]),
        v.new_empty(batch, capacity, groups, v.shape[3]),
        q.new_empty(batch, dtype=torch.int32),
    )


def fake_gradients(q, k, v, key):
    """The gradients of q, k, v and the state's keys and values, without their values."""
    kept = 0 if key is None else key.shape[1]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        k.new_empty(k.shape[0], kept, *k.shape[2:]),
        v.new_empty(v.shape[0], kept, *v.shape[2:]),
    )


class Row:
    """The tokens in the state and then the real tokens of each row, side by side."""

    def __init__(self, q, k, v, key, value, position, token_kind, window):
        self.q, self.k, self.v, self.state = q, k, v, (key, value)
        self.dtype = accumulation_dtype(q, k, v, key, value)
        batch, self.length = q.shape[:2]
        self.kept = 0 if key is None else key.shape[1]
        self.position = (
            q.new_zeros(batch, dtype=torch.int64) if position is None else position.long()
        )
        # A window of at least the row's length excludes no key.
        self.window = window if window and window < self.kept + self.length else None
        self.token_kind, self.order, self.nth = token_kind, None, None
        self.count, self.start = self.length, None  # of real tokens; of the last document
        if token_kind is not None:
            real = token_kind != PADDING
            place = torch.arange(self.length, device=q.device)
            nth = self.nth = real.cumsum(1) - 1
            self.count = nth[:, -1] + 1
            # Padding is moved behind the real tokens, so that this is a permutation.
            self.place = torch.where(real, nth, self.count[:, None] + place - 1 - nth)
            self.order = torch.empty_like(self.place).scatter_(1, self.place, place.expand_as(nth))
            self.filled, self.real = place < self.count[:, None], real
            self.start = torch.where(token_kind == STARTS, nth, -1).amax(1)

    @functools.cached_property
    def end(self):
        """The index in the row of keys behind the last token, int64 [B]."""
        return torch.zeros_like(self.position) + (self.kept + self.count)

    @functools.cached_property
    def next_position(self):
        """The position in its document of the next token to come, int64 [B]."""
        position = self.position + self.count
        if self.start is None:
            return position
        return torch.where(self.start < 0, position, self.count - self.start)

    def documents(self):
        """Numbers of the documents of queries and of keys, -1 where there is no key.

        None if all tokens are of one document.
        """
        if self.token_kind is None and not self.kept:
            return None
        of_queries = self.position.new_zeros(self.position.shape[0], self.length)
        if self.token_kind is not None:
            of_queries = (self.token_kind == STARTS).cumsum(1).gather(1, self.order)
        age = self.kept - 1 - torch.arange(self.kept, device=self.q.device)
        before = torch.where(age < self.position[:, None], 0, -1)
        return of_queries, torch.cat((before, of_queries), dim=1)

    def seen(self):
        """The first and the last key that each query attends to, int32 [B, T].

        None if all tokens are of one document: the window alone decides. Both numbers never fall
        along a row: padding attends to what the real token before it attends to.
        """
        if self.token_kind is None and not self.kept:
            return None
        nth = self.nth
        if nth is None:
            nth = torch.arange(self.length, device=self.q.device).expand(self.q.shape[:2])
        last = self.kept + nth
        first = self.kept - self.position.clamp_max(self.kept)[:, None].expand(last.shape)
        if self.token_kind is not None:
            first = torch.where(self.token_kind == STARTS, last, first).cummax(1).values
        if self.window is not None:
            first = torch.maximum(first, last - self.window + 1)
        return first.int().contiguous(), last.int().contiguous()

    def to_front(self, x):
        """[B, T, ...] with its real tokens in front, then zeros."""
        return x if self.order is None else _ring.take(x, self.order, self.filled)

    def put_back(self, x):
        """The opposite, and the transpose, of `to_front`."""
        return x if self.order is None else _ring.take(x, self.place, self.real)

    def keys_and_values(self):
        """[B, kept + T, G, ...], those in the state first, in the dtypes of k and v."""
        rows = []
        for ring, x in zip(self.state, (self.k, self.v), strict=True):
            row = self.to_front(x)
            if ring is not None:
                end = torch.full_like(self.position, self.kept)
                before = _ring.to_row(ring, self.position, end, self.kept)
                row = torch.cat((before.to(x.dtype), row), dim=1)
            rows.append(row)
        return rows

    def grouped(self, x):
        """[B, T, H, ...] with its real tokens in front, as [B, G, T, H / G, ...]."""
        x = self.to_front(x).to(self.dtype)
        return x.unflatten(2, (self.k.shape[2], -1)).transpose(1, 2).contiguous()

    def by_head(self, row):
        """[B, S, G, ...] as [B, G, S, ...]."""
        return row.to(self.dtype).transpose(1, 2).contiguous()

    def gradients(self, d_rows):
        """The gradients of k, v and the state's rings, from those of `keys_and_values`."""
        of_tokens, of_state = [], []
        start = torch.full_like(self.position, self.kept)
        for d_row, x in zip(d_rows, (self.k, self.v), strict=True):
            of_tokens.append(self.put_back(d_row[:, self.kept :]).contiguous().to(x.dtype))
            before = _ring.to_ring(d_row[:, : self.kept], self.position, start, self.kept)
            of_state.append(before.to(x.dtype))
        return *of_tokens, *of_state
