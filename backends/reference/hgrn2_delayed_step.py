"""`hgrn2_step` from an older memory and the tokens since: writes the memory every N + 1 tokens.

    S_i = diag(f_i) S_{i-1} + k_i v_i^T    for i = 1, ..., n: the tokens after the stored memory S_0

`hgrn2_step` continues from S_n. If n < N, decay, key and value of its token are stored as number
n + 1, and n increases by one. If n = N, its memory is stored, and n becomes 0. Padding leaves all
of these unchanged.
"""

import numpy as np

from ..constants import PADDING
from ._common import cast
from .hgrn2_step import hgrn2_step, operands


def hgrn2_delayed_step(
    q,
    f,
    v,
    memory,
    recent,
    count,
    lower_bound=None,
    norm_scale=None,
    token_kind=None,
    dtype=np.float64,
):
    """q, f: [B, H K]; v: [B, H V]; memory: [B, H, K, V]; lower_bound: [2, H K] or None.

    recent: [B, N, H (2 K + V)], f_i, k_i and v_i, arbitrary after the first n; count: int32 [B], n;
    norm_scale: [H V] or None; token_kind: [B] or None. Returns (y [B, H V], the sums of squares of
    o in groups [B, H, ceil(V / 32)], count, memory, recent).
    """
    stored, recent = cast(dtype, memory, recent)
    memory, (batch, heads, keys, _), limit = stored, stored.shape, recent.shape[1]
    for i in range(limit):
        parts = np.split(recent[:, i], [heads * keys, 2 * heads * keys], axis=1)
        decay, key, value = (x.reshape(batch, heads, -1) for x in parts)
        after = decay[..., None] * memory + key[..., None] * value[..., None, :]
        memory = np.where((i < count)[:, None, None, None], after, memory)
    _, *token, _ = operands(dtype, q, f, v, memory, lower_bound, token_kind)
    y, squares, memory = hgrn2_step(
        q, f, v, memory, lower_bound, norm_scale, token_kind, dtype=dtype
    )
    real = np.ones(batch, bool) if token_kind is None else np.asarray(token_kind) != PADDING
    token = np.concatenate([x.reshape(batch, 1, -1) for x in token], axis=2)
    is_next = real[:, None] & (np.arange(limit) == count[:, None])
    recent = np.where(is_next[..., None], token, recent)
    memory = np.where((real & (count == limit))[:, None, None, None], memory, stored)
    return y, squares, np.where(real, (count + 1) % (limit + 1), count), memory, recent
