"""A row of attention: what was seen before, and then the real tokens, side by side."""

import torch

from keras_recurrent.backends.torch import _ring
from keras_recurrent.backends.torch._common import PADDING, STARTS, accumulation_dtype


def attend(forward, q, k, v, sliding_window, initial_state, token_kind, capacity):
    """The output and the state, by an operator that takes and makes the state part by part."""
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
    """What such an operator makes, without its values."""
    batch, length, heads, _ = q.shape
    groups = k.shape[2]
    return (
        q.new_empty(batch, length, heads, v.shape[3]),
        k.new_empty(batch, capacity, groups, k.shape[3]),
        v.new_empty(batch, capacity, groups, v.shape[3]),
        q.new_empty(batch, dtype=torch.int32),
    )


def fake_gradients(q, k, v, key):
    """What its backward makes, of q, k, v and the state's keys and values."""
    kept = 0 if key is None else key.shape[1]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        k.new_empty(k.shape[0], kept, *k.shape[2:]),
        v.new_empty(v.shape[0], kept, *v.shape[2:]),
    )


class Row:
    """What was seen before and then the real tokens, side by side."""

    def __init__(self, q, k, v, key, value, position, token_kind, window):
        self.q, self.k, self.v, self.state = q, k, v, (key, value)
        self.dtype = accumulation_dtype(q, k, v, key, value)
        batch, self.length = q.shape[:2]
        self.kept = 0 if key is None else key.shape[1]
        self.position = (
            q.new_zeros(batch, dtype=torch.int64) if position is None else position.long()
        )
        # A window as long as the row is none.
        self.window = window if window and window < self.kept + self.length else None
        self.token_kind, self.order, self.nth = token_kind, None, None
        count, start = (
            torch.full_like(self.position, self.length),
            torch.full_like(self.position, -1),
        )
        if token_kind is not None:
            real = token_kind != PADDING
            place = torch.arange(self.length, device=q.device)
            nth = self.nth = real.cumsum(1) - 1
            count = nth[:, -1] + 1
            # Padding goes behind the real tokens, so that each has a place of its own.
            self.place = torch.where(real, nth, count[:, None] + place - 1 - nth)
            self.order = torch.empty_like(self.place).scatter_(1, self.place, place.expand_as(nth))
            self.in_front, self.real = place < count[:, None], real
            restart = token_kind == STARTS
            start = torch.where(restart, nth, -1).amax(1)
        self.end = self.kept + count
        self.next_position = torch.where(start < 0, self.position + count, count - start)

    def documents(self):
        """Numbers of queries and of keys, -1 where there is no key; None if all are of one."""
        if self.token_kind is None and not self.kept:
            return None
        of_queries = self.position.new_zeros(self.position.shape[0], self.length)
        if self.token_kind is not None:
            of_queries = (self.token_kind == STARTS).cumsum(1).gather(1, self.order)
        age = self.kept - 1 - torch.arange(self.kept, device=self.q.device)
        before = torch.where(age < self.position[:, None], 0, -1)
        return of_queries, torch.cat((before, of_queries), dim=1)

    def seen(self):
        """The first and the last key that each query sees, int32 [B, T]; None: by the window alone.

        They rise along a row: padding sees what the real token before it sees.
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

    def together(self, x):
        """[B, T, ...] with its real tokens first, then zeros."""
        return x if self.order is None else _ring.take(x, self.order, self.in_front)

    def back(self, x):
        """The opposite, and the transpose, of `together`."""
        return x if self.order is None else _ring.take(x, self.place, self.real)

    def keys_and_values(self):
        """[B, kept + T, G, ...], in their dtypes."""
        rows = []
        for ring, x in zip(self.state, (self.k, self.v), strict=True):
            row = self.together(x)
            if ring is not None:
                end = torch.full_like(self.position, self.kept)
                before = _ring.to_row(ring, self.position, end, self.kept)
                row = torch.cat((before.to(x.dtype), row), dim=1)
            rows.append(row)
        return rows

    def grouped(self, x):
        """[B, T, H, ...] together, as [B, G, T, H / G, ...]."""
        x = self.together(x).to(self.dtype)
        return x.unflatten(2, (self.k.shape[2], -1)).transpose(1, 2).contiguous()

    def by_head(self, row):
        """[B, S, G, ...] as [B, G, S, ...]."""
        return row.to(self.dtype).transpose(1, 2).contiguous()

    def gradients(self, d_rows):
        """Those of k, v and both rings of the state, from those of `keys_and_values`."""
        of_tokens, of_state = [], []
        start = torch.full_like(self.position, self.kept)
        for d_row, x in zip(d_rows, (self.k, self.v), strict=True):
            of_tokens.append(self.back(d_row[:, self.kept :]).contiguous().to(x.dtype))
            before = _ring.to_ring(d_row[:, : self.kept], self.position, start, self.kept)
            of_state.append(before.to(x.dtype))
        return *of_tokens, *of_state
