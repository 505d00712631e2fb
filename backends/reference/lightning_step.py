"""A decoding step of lightning attention.  Qin et al. 2024, arXiv:2405.17381.

    q = rotate(norm(q), p) query_scale,  k = rotate(norm(k), p)    p: the token's position
    S' = exp(log_decay) S + k v^T,  o = S'^T q                     in every head
    y = σ(output_gate) * norm_scale * o

`norm` and `rotate` are those of `local_attention_step`. Consecutive query heads share a key head.
At the start of a document S is 0; padding leaves S unchanged.
"""

import numpy as np

from ..constants import SQUARES_GROUP, STARTS
from ._common import cast, group_squares, sigmoid
from ._heads import prepare_heads
from .lightning_attention import lightning_attention


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
    """q: [B, H, K]; k: [B, G, K]; v: [B, G, V]; memory: [B, H, K, V]; log_decay: [H].

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
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    o, memory = lightning_attention(
        q[:, None], k[:, None], v[:, None], log_decay, memory, kinds, dtype
    )
    o = y = o[:, 0]
    if norm_scale is not None:
        y = y * cast(dtype, norm_scale)[0].reshape(y.shape[1:])
    if output_gate is not None:
        y = y * sigmoid(cast(dtype, output_gate)[0])
    return y, group_squares(o, SQUARES_GROUP), memory
