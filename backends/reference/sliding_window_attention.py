"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

A token attends to itself and to the real tokens before it in its document, to `sliding_window` in
all, or to every one if that is None. Head h of the queries uses head h // (H / G) of keys and
values.

The state is a ring buffer of C slots: the token at position p of its document is in slot p mod C.
`position` [B] is the position of the next token; from it follows which slots are filled.
"""

import numpy as np

from ..constants import GOES_ON, PADDING, STARTS
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

    Returns ([B, T, H, V], {"key": [B, C, G, K], "value": [B, C, G, V], "position": [B]}).
    """
    q, k, v = cast(dtype, q, k, v)
    keys, values, walks = _keys_and_walks(k, v, sliding_window, initial_state, token_kind, capacity)
    output = np.zeros((*q.shape[:3], v.shape[3]), dtype)
    for row, (steps, _, _) in enumerate(walks):
        for t, seen in steps:
            weights = _softmax(_logits(q[row, t], keys[row, seen]))
            output[row, t] = np.einsum("ghn,ngv->ghv", weights, values[row, seen]).reshape(
                output.shape[2:]
            )
    if walks[0][1] is None:
        return output, {}
    ring = np.array([ring for _, ring, _ in walks], int).reshape(len(walks), -1)
    final_state = {
        name: np.where(
            ring[..., None, None] < 0, 0, np.take_along_axis(t, ring[..., None, None], 1)
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
    """Returns the gradients of q, k, v and initial_state; of a state, those of key and value."""
    q, k, v, d_output = cast(dtype, q, k, v, d_output)
    keys, values, walks = _keys_and_walks(k, v, sliding_window, initial_state, token_kind, capacity)
    d_q, d_keys, d_values = np.zeros_like(q), np.zeros_like(keys), np.zeros_like(values)
    groups = k.shape[2]
    for row, (steps, ring, _) in enumerate(walks):
        for t, seen in steps:
            weights = _softmax(_logits(q[row, t], keys[row, seen]))
            d_o = d_output[row, t].reshape(groups, -1, v.shape[3])
            d_values[row, seen] += np.einsum("ghn,ghv->ngv", weights, d_o)
            d_weights = np.einsum("ghv,ngv->ghn", d_o, values[row, seen])
            d_logits = weights * (d_weights - np.sum(weights * d_weights, axis=2, keepdims=True))
            d_q[row, t] = np.einsum("ghn,ngk->ghk", d_logits, keys[row, seen]).reshape(q.shape[2:])
            grouped = q[row, t].reshape(groups, -1, q.shape[3])
            d_keys[row, seen] += np.einsum("ghn,ghk->ngk", d_logits, grouped)
        for slot, key in enumerate(ring or []):
            if key >= 0:
                d_keys[row, key] += np.asarray(d_final_state["key"][row, slot], dtype)
                d_values[row, key] += np.asarray(d_final_state["value"][row, slot], dtype)
    kept = keys.shape[1] - k.shape[1]
    d_state = {"key": d_keys[:, :kept], "value": d_values[:, :kept]}
    return d_q, d_keys[:, kept:], d_values[:, kept:], d_state


def _keys_and_walks(k, v, sliding_window, initial_state, token_kind, capacity):
    """The keys and the values, those in the state first, and the result of `_walk` for each row."""
    positions = np.zeros(k.shape[0], int)
    kept = 0
    if initial_state is not None:
        k, v = (
            np.concatenate([np.asarray(initial_state[name]).astype(t.dtype), t], axis=1)
            for name, t in (("key", k), ("value", v))
        )
        positions = np.asarray(initial_state["position"])
        kept = initial_state["key"].shape[1]
        capacity = kept
    elif capacity is None and sliding_window is not None:
        capacity = sliding_window - 1
    length = k.shape[1] - kept
    if token_kind is None:
        token_kind = np.full((k.shape[0], length), GOES_ON)
    walks = [
        _walk(token_kind[row], int(positions[row]), kept, capacity, sliding_window)
        for row in range(k.shape[0])
    ]
    return k, v, walks


def _walk(kinds, position, kept, capacity, sliding_window):
    """Go through the tokens of a row. Keys are numbers: slots of the state, then tokens of the row.

    Returns the pairs (t, keys that token t attends to) of all real tokens; the keys in the ring
    after the last token, -1 in an empty slot; and the position of the next token.
    """
    document = [p % kept for p in range(max(0, position - kept), position)]
    steps = []
    for t, kind in enumerate(kinds):
        if kind == PADDING:
            continue
        if kind == STARTS:
            document, position = [], 0
        document.append(kept + t)
        position += 1
        steps.append((t, document[-sliding_window:] if sliding_window else list(document)))
    if capacity is None:
        return steps, None, position
    ring = [-1] * capacity
    for age, key in enumerate(document[: -capacity - 1 : -1]):
        ring[(position - 1 - age) % capacity] = key
    return steps, ring, position


def _logits(q, keys):
    """q: [H, K]; keys: [n, G, K]. Returns [G, H / G, n]."""
    return np.einsum("ghk,ngk->ghn", q.reshape(keys.shape[1], -1, q.shape[1]), keys)


def _softmax(logits):
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    return weights / weights.sum(axis=2, keepdims=True)
