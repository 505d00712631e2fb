"""Keys, values and queries of attention, with real tokens first and padding last."""

import functools

import torch

from . import _circular_buffer
from ._common import accumulation_dtype
from ._real_tokens import RealTokens


def attend(forward, q, k, v, sliding_window, initial_state, token_kind, capacity):
    """Output and state, from an operator that takes and returns the tensors of the state."""
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


def schema(num_results, others=""):
    """The schema of an operator of the tensors that `AttentionInputs` takes.

    others: further tensors, after these.
    """
    inputs = "Tensor q, Tensor k, Tensor v, Tensor? key, Tensor? value, Tensor? position"
    inputs = ", ".join(filter(None, (inputs, "Tensor? token_kind", others)))
    return f"({inputs}, SymInt? window, SymInt capacity) -> ({', '.join(['Tensor'] * num_results)})"


def fake_results(q, k, v, capacity):
    """Fake results of the operators that `attend` calls."""
    batch, length, heads, _ = q.shape
    groups = k.shape[2]
    return (
        q.new_empty(batch, length, heads, v.shape[3]),
        k.new_empty(batch, capacity, groups, k.shape[3]),
        v.new_empty(batch, capacity, groups, v.shape[3]),
        q.new_empty(batch, dtype=torch.int32),
    )


def fake_gradients(q, k, v, key):
    """Fake gradients of q, k, v and the cached keys and values."""
    cached = 0 if key is None else key.shape[1]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        k.new_empty(k.shape[0], cached, *k.shape[2:]),
        v.new_empty(v.shape[0], cached, *v.shape[2:]),
    )


class AttentionInputs:
    """The cached tokens, followed by the real tokens of each sequence."""

    def __init__(self, q, k, v, key, value, position, token_kind, window):
        self.q, self.k, self.v, self.state = q, k, v, (key, value)
        self.dtype = accumulation_dtype(q, k, v, key, value)
        batch, self.length = q.shape[:2]
        self.cached = 0 if key is None else key.shape[1]
        self.position = (
            q.new_zeros(batch, dtype=torch.int64) if position is None else position.long()
        )
        # A window of at least the sequence length excludes no key.
        self.window = window if window and window < self.cached + self.length else None
        self.token_kind = token_kind
        self.tokens = None if token_kind is None else RealTokens(token_kind)
        # `count` is the number of real tokens, `start` the index of the last document's first.
        self.count, self.start = self.length, None
        if self.tokens is not None:
            self.count = self.tokens.count[:, 0]
            self.start = torch.where(self.tokens.starts, self.tokens.nth, -1).amax(1)

    @functools.cached_property
    def end(self):
        """The index after the last real token in the sequence of keys, int64 [B]."""
        return torch.zeros_like(self.position) + (self.cached + self.count)

    @functools.cached_property
    def next_position(self):
        """The position of the next token in its document, int64 [B]."""
        position = self.position + self.count
        if self.start is None:
            return position
        return torch.where(self.start < 0, position, self.count - self.start)

    def documents(self):
        """Document numbers of queries and of keys, -1 where there is no key.

        None if all tokens belong to one document.
        """
        if self.token_kind is None and not self.cached:
            return None
        of_queries = self.position.new_zeros(self.position.shape[0], self.length)
        if self.tokens is not None:
            of_queries = self.tokens.document
        age = self.cached - 1 - torch.arange(self.cached, device=self.q.device)
        before = torch.where(age < self.position[:, None], 0, -1)
        return of_queries, torch.cat((before, of_queries), dim=1)

    def key_ranges(self):
        """The first and the last key that each query attends to, int32 [B, T].

        None if all tokens belong to one document, where the window alone decides. Both numbers
        never decrease along a sequence: padding attends to what the real token before it does.
        """
        if self.token_kind is None and not self.cached:
            return None
        if self.tokens is None:
            nth = torch.arange(self.length, device=self.q.device).expand(self.q.shape[:2])
        else:
            nth = self.tokens.nth
        last = self.cached + nth
        first = self.cached - self.position.clamp_max(self.cached)[:, None].expand(last.shape)
        if self.tokens is not None:
            first = torch.where(self.tokens.starts, last, first).cummax(1).values
        if self.window is not None:
            first = torch.maximum(first, last - self.window + 1)
        return first.int().contiguous(), last.int().contiguous()

    def to_front(self, x):
        """[B, T, ...] with the real tokens first, then zeros."""
        return x if self.tokens is None else self.tokens.to_front(x)

    def put_back(self, x):
        """The inverse, and the transpose, of `to_front`."""
        return x if self.tokens is None else self.tokens.put_back(x)

    def keys_and_values(self):
        """Keys and values [B, cached + T, G, ...], cached ones first, in the dtypes of k and v."""
        sequences = []
        for buffer, x in zip(self.state, (self.k, self.v), strict=True):
            sequence = self.to_front(x)
            if buffer is not None:
                end = torch.full_like(self.position, self.cached)
                before = _circular_buffer.to_sequence(buffer, self.position, end, self.cached)
                sequence = torch.cat((before.to(x.dtype), sequence), dim=1)
            sequences.append(sequence)
        return sequences

    def grouped(self, x):
        """[B, T, H, ...] with the real tokens first, as [B, G, T, H / G, ...]."""
        x = self.to_front(x).to(self.dtype)
        return x.unflatten(2, (self.k.shape[2], -1)).transpose(1, 2).contiguous()

    def head_major(self, sequence):
        """[B, S, G, ...] as [B, G, S, ...]."""
        return sequence.to(self.dtype).transpose(1, 2).contiguous()

    def gradients(self, d_sequences):
        """The gradients of k, v and the cached keys and values, from those of `keys_and_values`."""
        of_tokens, of_state = [], []
        start = torch.full_like(self.position, self.cached)
        for d_sequence, x in zip(d_sequences, (self.k, self.v), strict=True):
            of_tokens.append(self.put_back(d_sequence[:, self.cached :]).contiguous().to(x.dtype))
            before = _circular_buffer.from_sequence(
                d_sequence[:, : self.cached], self.position, start, self.cached
            )
            of_state.append(before.to(x.dtype))
        return *of_tokens, *of_state
