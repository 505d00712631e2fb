"""A decoding step of `scalar_decay_attention`, or of lightning attention: arXiv:2405.17381.

    q = rotate(norm(q), p) query_scale,  k = rotate(norm(k), p)    p: the token's position
    S' = exp(log_decay) S + k v^T,  o = S'^T q                     in every head
    y = σ(output_gate) * norm_scale * o

`norm` and `rotate` are those of `local_attention_step`. Consecutive heads share a query, a key or a
value where these have fewer heads than the memory.
At the start of a document S is 0; padding leaves S unchanged.
"""

import numpy as np

from ..constants import SQUARES_GROUP, STARTS
from ._common import cast, group_squares, sigmoid
from ._heads import prepare_heads
from .scalar_decay_attention import scalar_decay_attention


def lightning_step(
    q,
    k,
    v,
    memory,
    log_decay,
    position=None,
    q_scale=None,
    k_scale=None,
    frequencies=None,
    norm_scale=None,
    output_gate=None,
    token_kind=None,
    epsilon=None,
    query_scale=None,
    dtype=np.float64,
):
    """q, k: [B, G, K]; v: [B, G, V]; memory: [B, H, K, V]; log_decay: [H] or [B, H].

    The number G of heads may differ between q, k and v; each divides H.
    position: [B], read with `frequencies` [R]; q_scale, k_scale: [K] or None. norm_scale: [H V] or
    None; output_gate: [B, H, V] or None. Returns (y [B, H, V], the sums of squares of o in groups
    [B, H, ceil(V / 32)], memory).
    """
    q, k, v, memory, log_decay = cast(dtype, q, k, v, memory, log_decay)
    kinds = None if token_kind is None else np.asarray(token_kind)[:, None]
    if position is not None and kinds is not None:
        position = np.where(kinds[:, 0] == STARTS, 0, position)
    q = prepare_heads(q, position, frequencies, q_scale, epsilon)
    k = prepare_heads(k, position, frequencies, k_scale, epsilon)
    if query_scale is not None:
        q = q * q.dtype.type(query_scale)
    q, k, v = (np.repeat(x, memory.shape[1] // x.shape[1], axis=1)[:, None] for x in (q, k, v))
    log_decay = np.broadcast_to(log_decay, memory.shape[:2])[:, None]
    o, memory = scalar_decay_attention(q, k, v, log_decay, memory, kinds, dtype)
    o = y = o[:, 0]
    if norm_scale is not None:
        y = y * cast(dtype, norm_scale)[0].reshape(y.shape[1:])
    if output_gate is not None:
        y = y * sigmoid(cast(dtype, output_gate)[0])
    return y, group_squares(o, SQUARES_GROUP), memory
