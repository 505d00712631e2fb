"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

A token attends to itself and to the real tokens before it in its document, to `sliding_window` in
all, or to all of them if that is None. Head h of the queries uses head h // (H / G) of keys and
values.

The state is a circular buffer of C slots: the token at position p of its document is in slot p mod
C. `position` [B] is the position of the next token; it determines which slots are filled.
"""

import numpy as np

from ..constants import CONTINUES, PADDING, STARTS
from ._common import cast


def sliding_window_attention(
    q,
    k,
    v,
    sliding_window=None,
    initial_state=None,
    token_kind=None,
    capacity=None,
    dtype=np.float64,
):
    """q: [B, T, H, K]; k: [B, T, G, K]; v: [B, T, G, V].

    Returns ([B, T, H, V], {"key": [B, C, G, K], "value": [B, C, G, V], "position": [B]}). C is
    the capacity of the initial state, else `capacity`, else `sliding_window` - 1; without any of
    them the state is an empty dict.
    """
    q, k, v = cast(dtype, q, k, v)
    keys, values, walks = _keys_and_walks(k, v, sliding_window, initial_state, token_kind, capacity)
    output = np.zeros((*q.shape[:3], v.shape[3]), dtype)
    for index, (steps, _, _) in enumerate(walks):
        for t, seen in steps:
            weights = _softmax(_logits(q[index, t], keys[index, seen]))
            output[index, t] = np.einsum("ghn,ngv->ghv", weights, values[index, seen]).reshape(
                output.shape[2:]
            )
    if walks[0][1] is None:
        return output, {}
    buffer = np.array([buffer for _, buffer, _ in walks], int).reshape(len(walks), -1)
    final_state = {
        name: np.where(
            buffer[..., None, None] < 0, 0, np.take_along_axis(t, buffer[..., None, None], 1)
        )
        for name, t in (("key", keys), ("value", values))
    }
    final_state["position"] = np.array([position for _, _, position in walks], "int32")
    return output, final_state


def sliding_window_attention_gradient(
    d_output,
    d_final_state,
    q,
    k,
    v,
    sliding_window=None,
    initial_state=None,
    token_kind=None,
    capacity=None,
    dtype=np.float64,
):
    """Returns the gradients of q, k, v and initial_state (its key and value)."""
    q, k, v, d_output = cast(dtype, q, k, v, d_output)
    keys, values, walks = _keys_and_walks(k, v, sliding_window, initial_state, token_kind, capacity)
    d_q, d_keys, d_values = np.zeros_like(q), np.zeros_like(keys), np.zeros_like(values)
    groups = k.shape[2]
    for index, (steps, buffer, _) in enumerate(walks):
        for t, seen in steps:
            weights = _softmax(_logits(q[index, t], keys[index, seen]))
            d_o = d_output[index, t].reshape(groups, -1, v.shape[3])
            d_values[index, seen] += np.einsum("ghn,ghv->ngv", weights, d_o)
            d_weights = np.einsum("ghv,ngv->ghn", d_o, values[index, seen])
            d_logits = weights * (d_weights - np.sum(weights * d_weights, axis=2, keepdims=True))
            d_q[index, t] = np.einsum("ghn,ngk->ghk", d_logits, keys[index, seen]).reshape(
                q.shape[2:]
            )
            grouped = q[index, t].reshape(groups, -1, q.shape[3])
            d_keys[index, seen] += np.einsum("ghn,ghk->ngk", d_logits, grouped)
        for slot, key in enumerate(buffer or []):
            if key >= 0:
                d_keys[index, key] += np.asarray(d_final_state["key"][index, slot], dtype)
                d_values[index, key] += np.asarray(d_final_state["value"][index, slot], dtype)
    cached = keys.shape[1] - k.shape[1]
    d_state = {"key": d_keys[:, :cached], "value": d_values[:, :cached]}
    return d_q, d_keys[:, cached:], d_values[:, cached:], d_state


def _keys_and_walks(k, v, sliding_window, initial_state, token_kind, capacity):
    """Keys and values, cached ones first, and the results of `_walk_sequence` for each sequence."""
    positions = np.zeros(k.shape[0], int)
    cached = 0
    if initial_state is not None:
        k, v = (
            np.concatenate([np.asarray(initial_state[name]).astype(t.dtype), t], axis=1)
            for name, t in (("key", k), ("value", v))
        )
        positions = np.asarray(initial_state["position"])
        cached = initial_state["key"].shape[1]
        capacity = cached
    elif capacity is None and sliding_window is not None:
        capacity = sliding_window - 1
    length = k.shape[1] - cached
    if token_kind is None:
        token_kind = np.full((k.shape[0], length), CONTINUES)
    walks = [
        _walk_sequence(token_kind[index], int(positions[index]), cached, capacity, sliding_window)
        for index in range(k.shape[0])
    ]
    return k, v, walks


def _walk_sequence(kinds, position, cached, capacity, sliding_window):
    """Lists the keys of each token of a sequence, as indices: cached slots first, then tokens.

    Returns the pairs (t, keys that token t attends to) of all real tokens; the keys in the buffer
    after the last token, -1 in an empty slot; and the position of the next token.
    """
    document = [p % cached for p in range(max(0, position - cached), position)]
    steps = []
    for t, kind in enumerate(kinds):
        if kind == PADDING:
            continue
        if kind == STARTS:
            document, position = [], 0
        document.append(cached + t)
        position += 1
        steps.append((t, document[-sliding_window:] if sliding_window else list(document)))
    if capacity is None:
        return steps, None, position
    buffer = [-1] * capacity
    for age, key in enumerate(document[: -capacity - 1 : -1]):
        buffer[(position - 1 - age) % capacity] = key
    return steps, buffer, position


def _logits(q, keys):
    """q: [H, K]; keys: [n, G, K]. Returns [G, H / G, n]."""
    return np.einsum("ghk,ngk->ghn", q.reshape(keys.shape[1], -1, q.shape[1]), keys)


def _softmax(logits):
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    return weights / weights.sum(axis=2, keepdims=True)
