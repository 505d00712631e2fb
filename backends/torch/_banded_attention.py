"""Softmax attention of a row of queries to the keys before them, block by block.

Queries stand at the end of their keys: of S keys and T queries, query t is at the place of key
S - T + t. It sees that key and those before it, `window` in all (None: every one), if they are of
its own document. A block of queries meets the keys that some query of it sees, so time grows as T
times the window, and memory as T.

q: [B, G, T, R, K], where R heads share a key; k: [B, G, S, K]; v: [B, G, S, V]; documents: numbers
of the queries [B, T] and of the keys [B, S], or None where all are of one.
"""

import torch

# Queries of a block, over all heads of a group: enough for a matrix product, few for the cache.
ROWS = 256


def forward(q, k, v, documents, window):
    """Returns [B, G, T, R, V]."""
    output = q.new_empty(*q.shape[:4], v.shape[3])
    for queries, keys in _blocks(q, k, window):
        weights = _weights(queries, keys, q, k, documents, window)
        output[:, :, queries] = (weights @ v[:, :, keys]).view(output[:, :, queries].shape)
    return output


def backward(d_output, q, k, v, documents, window):
    """Returns the gradients of q, k and v."""
    d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in _blocks(q, k, window):
        k_b, v_b, d_o = k[:, :, keys], v[:, :, keys], _flat(d_output, queries)
        weights = _weights(queries, keys, q, k, documents, window)
        d_v[:, :, keys] += weights.transpose(2, 3) @ d_o
        d_logits = (d_o @ v_b.transpose(2, 3)).mul_(weights)
        d_logits.addcmul_(weights, d_logits.sum(-1, keepdim=True), value=-1)
        d_q[:, :, queries] = (d_logits @ k_b).view(d_q[:, :, queries].shape)
        d_k[:, :, keys] += d_logits.transpose(2, 3) @ _flat(q, queries)
    return d_q, d_k, d_v


def _blocks(q, k, window):
    """Slices of the queries, and of the keys that they see."""
    length, before = q.shape[2], k.shape[2] - q.shape[2]
    size = max(16, ROWS // q.shape[3])
    if window is not None:
        size = min(size, max(16, window // 2))
    for start in range(0, length, size):
        end = min(start + size, length)
        first = 0 if window is None else max(0, before + start + 1 - window)
        yield slice(start, end), slice(first, before + end)


def _flat(x, queries):
    """Some of [B, G, T, R, ...], as [B, G, rows, ...]."""
    return x[:, :, queries].flatten(2, 3)


def _weights(queries, keys, q, k, documents, window):
    """The softmax [B, G, block * R, keys] of a block of queries."""
    logits = _flat(q, queries) @ k[:, :, keys].transpose(2, 3)
    at = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    distance = at + (k.shape[2] - q.shape[2]) - torch.arange(keys.start, keys.stop, device=q.device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    if documents is not None:
        of_queries, of_keys = documents
        hidden = hidden | (of_queries[:, queries, None] != of_keys[:, None, keys])
        hidden = hidden[:, None]
    logits.view(*logits.shape[:2], -1, q.shape[3], logits.shape[3]).masked_fill_(
        hidden[..., None, :], float("-inf")
    )
    return logits.softmax(-1)
