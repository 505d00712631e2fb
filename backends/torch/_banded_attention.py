"""Softmax attention of queries to the keys before them, block by block, as in `backends/jax`.

q: [B, G, T, R, K]; k: [B, G, S, K]; v: [B, G, S, V]; documents: of queries [B, T] and keys [B, S],
or None if all tokens belong to one document.
"""

import torch

# Queries in a block, times heads that share a key: enough for an efficient matrix product, and few
# enough for the logits to stay in the cache.
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
        # The difference is computed first, as in `backends/jax`.
        d_logits = d_o @ v_b.transpose(2, 3)
        d_logits.sub_((weights * d_logits).sum(-1, keepdim=True)).mul_(weights)
        d_q[:, :, queries] = (d_logits @ k_b).view(d_q[:, :, queries].shape)
        d_k[:, :, keys] += d_logits.transpose(2, 3) @ _flat(q, queries)
    return d_q, d_k, d_v


def _blocks(q, k, window):
    """Slices of the queries, and of the keys that they attend to."""
    length, before = q.shape[2], k.shape[2] - q.shape[2]
    size = max(16, ROWS // q.shape[3])
    if window is not None:
        size = min(size, max(16, window // 2))
    for start in range(0, length, size):
        end = min(start + size, length)
        first = 0 if window is None else max(0, before + start + 1 - window)
        yield slice(start, end), slice(first, before + end)


def _flat(x, queries):
    """The queries of [B, G, T, R, ...] as [B, G, queries * R, ...]."""
    return x[:, :, queries].flatten(2, 3)


def _weights(queries, keys, q, k, documents, window):
    """The softmax [B, G, block * R, keys] of a block of queries."""
    logits = _flat(q, queries) @ k[:, :, keys].transpose(2, 3)
    last_key = torch.arange(queries.start, queries.stop, device=q.device) + k.shape[2] - q.shape[2]
    distance = last_key[:, None] - torch.arange(keys.start, keys.stop, device=q.device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    if documents is not None:
        query_documents, key_documents = documents
        hidden = hidden | (query_documents[:, queries, None] != key_documents[:, None, keys])
        hidden = hidden[:, None]
    logits.view(*logits.shape[:2], -1, q.shape[3], logits.shape[3]).masked_fill_(
        hidden[..., None, :], float("-inf")
    )
    return logits.softmax(-1)
